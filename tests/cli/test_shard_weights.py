"""Refusals before the command starts anything. tests/integration tests what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.cli.main import main
from tests.model_cards import LLAMA_70B


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return folder


def refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: Path, model: object, **vllm: Any
) -> str:
    """The one line that the command prints."""
    args = {"model": {"path": str(model)}, "engine": {"vllm": vllm}}
    application = {"name": "a", "import_path": "specserve.app:build", "args": args}
    config = tmp_path / "serve.yaml"
    config.write_text(yaml.safe_dump({"applications": [application]}))
    before = sorted(tmp_path.rglob("*"))
    assert main(["shard-weights", "--config", str(config), str(out)]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    said = capsys.readouterr().err
    assert said.startswith("specserve: error: ")
    assert said.count("\n") == 1
    return said


def test_an_out_folder_that_is_not_empty_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(tmp_path, capsys, model, model)
    assert "OUT: " in said
    assert "allowed: a folder that does not exist yet, or is empty" in said


def test_an_out_folder_in_a_missing_folder_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(tmp_path, capsys, tmp_path / "none/out", model)
    assert "allowed: a folder in an existing folder" in said


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        (
            {"load_format": "dummy"},
            "engine.vllm.load_format: 'dummy' is not allowed; allowed: auto",
        ),
        (
            {"quantization": "fp8_per_block"},
            "allowed: none: vLLM quantizes only what it reads from",
        ),
    ],
)
def test_weights_that_cannot_be_sharded_are_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], vllm: Any, words: str
) -> None:
    assert words in refusal(tmp_path, capsys, tmp_path / "out", model, **vllm)


def test_a_model_of_the_hub_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(tmp_path, capsys, tmp_path / "out", "org/name")
    assert "model.path: 'org/name' is not allowed; allowed: a folder of this machine" in said
