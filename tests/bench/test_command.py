from __future__ import annotations

from pathlib import Path

import pytest

from specserve.cli.main import main


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: "),
        (["--url", "nonsense"], "--url: 'nonsense' is not allowed"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--url", "x", "--record-output", "/nowhere/x.csv"], "--record-output: '/nowhere/x.csv'"),
        (["--url", "x", "--save-output", "/nowhere/x.json"], "--save-output: '/nowhere/x.json'"),
    ],
)
def test_a_wrong_argument_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    path = tmp_path / "tokens.csv"
    path.write_text("1,2\n")
    assert main(["bench", "tokens", str(path), *options]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert told in error


@pytest.mark.parametrize("options", [[], ["--url", "x", "--config", "y"]])
def test_a_server_or_a_file_is_needed(options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "tokens", "tokens.csv", *options])
