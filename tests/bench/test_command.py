from __future__ import annotations

from pathlib import Path

import pytest

from specserve.cli.main import main
from specserve.core.config import AppConfig
from specserve.engine.methods import Method


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: "),
        (["--url", "nonsense"], "--url: 'nonsense' is not allowed"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--url", "x", "--record-output", "/nowhere/x.csv"], "--record-output: '/nowhere/x.csv'"),
        (["--url", "x", "--save-output", "/nowhere/x.json"], "--save-output: '/nowhere/x.json'"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    path = tmp_path / "tokens.csv"
    path.write_text("1,2\n")
    assert main(["bench", "tokens", str(path), *options]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert words in error


@pytest.mark.parametrize(
    ("speculation", "method"),
    [("auto", "all"), ("off", "none"), ("ngram", "ngram"), ("trie", "trie")],
)
def test_the_speculation_option_chooses_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculation: str, method: str
) -> None:
    class Started(Exception):
        """Raised instead of starting an engine."""

    def start(config: AppConfig, asked: Method) -> None:
        raise Started(str(asked))

    monkeypatch.setattr("specserve.bench.local.EngineProcess", start)
    path = tmp_path / "tokens.csv"
    path.write_text("1,2\n")
    config = str(Path(__file__).parents[2] / "configs/demo.yaml")
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(Started, match=f"^{method}$"):
        main(["bench", "tokens", str(path), "--config", config, "--speculation", speculation])


def test_an_unknown_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokens.csv"
    path.write_text("1,2\n")
    monkeypatch.chdir(Path(__file__).parents[2])
    command = ["bench", "tokens", str(path), "--config", "configs/demo.yaml"]
    assert main([*command, "--speculation", "tree"]) == 2
    assert "--speculation: 'tree' is not allowed; allowed: auto, off, ngram" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("options", [[], ["--url", "x", "--config", "y"]])
def test_either_url_or_config_is_needed(options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "tokens", "tokens.csv", *options])
