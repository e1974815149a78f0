import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specserve.core.config import parse
from specserve.core.errors import EngineError
from specserve.engine.generation import Job, Sampling
from specserve.engine.hugging_face import HuggingFaceEngine
from tests.integration.cluster import model_path

PROMPT = "def area(width, height):\n    return width * height\n\ndef area(width, height):\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model_path("demo-draft"), folder)
    return folder


def engine_of(model: Path) -> HuggingFaceEngine:
    return HuggingFaceEngine(parse({"model": {"path": str(model)}, "engine": {"dtype": "float32"}}))


def plainly(model: Path, prompt: list[int], number: int) -> list[int]:
    """The first ``number`` tokens of greedy decoding."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(number):
            ids = torch.cat([ids, target(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return list(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("has_end", [True, False])
def test_decoding_is_greedy_for_any_generation_config(model: Path, has_end: bool) -> None:
    settings = {"no_repeat_ngram_size": 1, "num_beams": 2, "max_time": 0.001, "min_length": 99}
    (model / "generation_config.json").write_text(json.dumps(settings))
    if not has_end:
        config = json.loads((model / "config.json").read_text())
        config["eos_token_id"] = config["pad_token_id"] = None
        (model / "config.json").write_text(json.dumps(config))
    prompt = AutoTokenizer.from_pretrained(model).encode(PROMPT)
    progress: list[tuple[int, int]] = []
    job = Job(tuple(prompt), Sampling(max_tokens=12))
    result = engine_of(model).run([job, job], 1, lambda *numbers: progress.append(numbers))
    expected = plainly(model, prompt, 12)
    assert [list(each.token_ids) for each in result.completions] == [expected, expected]
    assert [each.finish_reason for each in result.completions] == ["length", "length"]
    assert progress == [(0, n) for n in range(1, 13)] + [(1, n) for n in range(13, 25)]
    assert all(len(each.token_seconds) == 12 for each in result.completions)


def test_decoding_stops_at_an_end_token_that_is_not_in_the_text(
    model: Path,
) -> None:
    prompt = AutoTokenizer.from_pretrained(model).encode(PROMPT)
    third = plainly(model, prompt, 3)[-1]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, third]}))
    (only,) = (
        engine_of(model)
        .run([Job(tuple(prompt), Sampling(max_tokens=12))], 1, lambda *_: None)
        .completions
    )
    assert only.token_ids[-1] == third
    assert len(only.token_ids) <= 3
    assert only.finish_reason == "stop"
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert only.text == tokenizer.decode(only.token_ids[:-1], skip_special_tokens=True)


def test_a_checkpoint_that_transformers_cannot_load_is_an_engine_error(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(EngineError, match=r"^method hf: "):
        engine_of(model)
