from __future__ import annotations

from pathlib import Path

import pytest

from specserve.cli.main import main
from tests.drafters.mtp_reference import MODEL


def test_the_module_is_written_with_a_drafters_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new/mtp"
    assert main(["split-mtp", str(MODEL), str(out)]) == 0
    assert f"bytes written to {out}" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    files = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert files <= names
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in out.iterdir())
    assert [path.name for path in out.parent.iterdir()] == ["mtp"]


def test_an_empty_folder_may_be_written_to(tmp_path: Path) -> None:
    assert main(["split-mtp", str(MODEL), str(tmp_path)]) == 0
    assert (tmp_path / "config.json").exists()


def test_an_output_folder_that_is_not_empty_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["split-mtp", str(MODEL), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specserve: error: OUT: ")
    assert "a folder that does not exist yet, or is empty" in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("checkpoint", ["configs", "configs/models/demo-draft", "nowhere"])
def test_a_checkpoint_without_a_module_is_refused(
    tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(MODEL.parents[2] / checkpoint)
    assert main(["split-mtp", folder, str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specserve: error: CHECKPOINT: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
