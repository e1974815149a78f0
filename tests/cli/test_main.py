from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys

import pytest

from specserve import __version__
from specserve.cli import main as cli
from specserve.core.errors import MissingExtraError


def use(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Makes the command ``check`` raise ``error``."""

    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("specserve.cli.check.run", run)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"specserve {__version__}\n"


def test_help_lists_the_commands_in_the_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    commands = re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert commands == [
        *("check", "generate", "compare", "evaluate", "bench", "vllm", "trie", "split-mtp"),
        "shard-weights",
    ]


def test_an_unknown_command_exits_with_code_2() -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["chekc"])


def test_an_error_of_ours_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, MissingExtraError("check"))
    assert cli.main(["check", "x"]) == 2
    expected = f"specserve: error: {MissingExtraError('check')}\n"
    assert capsys.readouterr().err == expected


def test_a_missing_package_of_an_extra_is_named_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert cli.main(["check", "x"]) == 2
    assert capsys.readouterr().err.startswith("specserve: error: this command needs torch: run")
    use(monkeypatch, ModuleNotFoundError("No module named 'gone'", name="gone"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["check", "x"])


def test_an_interrupt_exits_with_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, KeyboardInterrupt())
    assert cli.main(["check", "x"]) == 130


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["check", "--clutser", "1x2"],
            "specserve check: error: unrecognized arguments: --clutser",
        ),
        (
            ["bench", "tokens"],
            "specserve bench tokens: error: the following arguments are required",
        ),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(words)
    assert line.endswith(f"; see {words.split(':')[0]} --help")


WAITS = """
import argparse, contextlib, sys, time
from specserve.cli import main

@contextlib.contextmanager
def engine():
    try:
        print("started", flush=True)
        yield
    finally:
        print("ended", flush=True)

def run(args):
    with engine():
        time.sleep(60)

parser = argparse.ArgumentParser()
parser.set_defaults(run=run)
main.build_parser = lambda: parser
sys.exit(main.main([]))
"""
"""A command that has started an engine."""


def test_sigterm_ends_what_a_command_has_started() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "started\n"
        run.terminate()
        assert run.stdout.read() == "ended\n"
    assert run.returncode == 128 + signal.SIGTERM
