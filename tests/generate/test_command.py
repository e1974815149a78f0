from __future__ import annotations

import pytest

from specserve.cli.main import main

DRAWN = ["--task", "greedy_search_with_sampling"]
BEAMS = ["--task", "beam_search"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: "),
        (["--config", "none.yaml"], "none.yaml"),
        (["--url", "x", "--chat-template", "none.jinja"], "--chat-template: 'none.jinja'"),
        (["--url", "x", "--save-output", "/nowhere/x.json"], "--save-output: '/nowhere/x.json'"),
        (["--url", "x", *DRAWN, "--top-p", "0"], "--top-p: 0.0 is not allowed"),
        (["--url", "x", *DRAWN, "--temperature", "nan"], "--temperature: nan is not allowed"),
        (["--url", "x", *BEAMS, "--length-penalty", "inf"], "--length-penalty: inf is not allowed"),
        (["--url", "x", *BEAMS, "--num-beams", "1"], "--num-beams: 1 is not allowed"),
        (["--url", "x", *BEAMS, "--top-k", "4"], "--top-k: 4 is not allowed"),
        (["--url", "x", "--num-beams", "4"], "--num-beams: 4 is not allowed; allowed: only with"),
        (["--url", "x", "--temperature", "0.7"], "--temperature: 0.7 is not allowed"),
        (["--url", "x", "--history-turns", "2"], "--history-turns: 2 is not allowed"),
        (["--config", "x", "--task", "beam_search"], "--config: 'x' is not allowed"),
        (["--url", "x", "--task", "beam_search", "--stream"], "--stream: True is not"),
        (["--url", "x", "--task", "beam_search", "--add-eos-token", "5"], "--add-eos-token: ['5']"),
        (
            ["--url", "x", "--task", "beam_search_with_sampling", "--temperature", "0"],
            "--temperature: 0.0",
        ),
        (["--url", "x", "--save-output", "/tmp"], "--save-output: '/tmp'"),
        (["--url", "x", "--task", "chat", "--input-texts", "a"], "--input-texts: ['a']"),
        (["--url", "x", "--input-ids", "1", "--system", "Be kind"], "--system: 'Be kind'"),
        (["--url", "x", "--input-file", "a.csv", "--chat-template", "t"], "--chat-template: 't'"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["generate", *options]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert words in error


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--url", "x", "--config", "y"],
        ["--url", "x", "--task", "other"],
        ["--url", "x", "--num-beams", "0"],
        ["--url", "x", "--input-texts", "a", "--input-ids", "1"],
    ],
)
def test_options_exclude_one_another(options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", *options])


def test_one_beam_is_no_beam_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--url", "http://127.0.0.1:9", "--num-beams", "1"]) == 2
    assert "no server answers" in capsys.readouterr().err
