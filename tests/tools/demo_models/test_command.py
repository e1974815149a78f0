from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_models.__main__ import main
from tools.demo_models.shapes import BaseShape, DraftShape

MODELS = str(Path(__file__).parents[3] / "configs" / "models")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--minutes", "0"), "minutes: 0.0 is not allowed; allowed: more than 0"),
        (("--device", "tpu"), "device: 'tpu' is not allowed; allowed: auto, cpu, cuda"),
        (("--batch-tokens", "1"), "batch-tokens: 1 is not allowed"),
        (("--from", "/nonexistent"), "from: '/nonexistent' is not allowed; allowed: a folder with"),
        (("--from", MODELS, "--output", MODELS), "allowed: another folder than the output's"),
        (("--corpus", "/nonexistent"), "corpus: '/nonexistent' is not allowed"),
    ],
)
def test_a_wrong_option_is_refused_with_name_and_value(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--work", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_two_steps_end_with_two_measured_model_folders(corpus: Path, tmp_path: Path) -> None:
    folders = {"--corpus": corpus, "--work": tmp_path / "work", "--output": tmp_path / "models"}
    options = {"--device": "cpu", "--batch-tokens": 128, "--max-tokens": 256}
    flat = [str(part) for pair in {**folders, **options}.items() for part in pair]
    assert main([*flat, "--evaluation-tokens", "1024"]) == 0
    for name, shape in (("demo-base", BaseShape()), ("demo-draft", DraftShape())):
        folder = tmp_path / "models" / name
        record = json.loads((folder / "training.json").read_text())
        assert record["training"]["steps"] == 2
        assert f"{record['held_out']['loss']:.3f}" in (folder / "README.md").read_text()
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.hidden_size == shape.hidden_size
        assert AutoTokenizer.from_pretrained(folder).chat_template
