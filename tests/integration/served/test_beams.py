"""Beam search over HTTP, compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.api import Api
from tests.integration.cluster import model_path

PROMPT = [*range(40, 60), *range(40, 60)]
WIDTH, LENGTH = 3, 12
ASKED: dict[str, Any] = {
    **{"prompt": PROMPT, "use_beam_search": True, "n": WIDTH, "max_tokens": LENGTH},
    **{"ignore_eos": True, "return_token_ids": True},
}
DRAWN: dict[str, Any] = {**ASKED, "temperature": 1.0, "vllm_xargs": {"beam_sample": 1}}


def test_the_best_beams_are_those_of_transformers(api: Api) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path("demo-draft"), dtype=torch.float32)
    beams = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=LENGTH,
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer = api.complete(**ASKED, temperature=0)
    assert [each["token_ids"] for each in answer["choices"]] == beams[:, len(PROMPT) :].tolist()


def test_a_seed_repeats_its_beams_and_another_seed_does_not(api: Api) -> None:
    drawn = [api.complete(**DRAWN, seed=seed)["choices"] for seed in (1, 1, 2)]
    texts = [[each["text"] for each in choices] for choices in drawn]
    assert texts[0] == texts[1] != texts[2]
    assert [len(each["token_ids"]) for each in drawn[0]] == [LENGTH] * WIDTH


@pytest.mark.parametrize("body", [ASKED, DRAWN])
def test_streamed_beams_are_refused(api: Api, body: dict[str, Any]) -> None:
    answer = api.http.post("/v1/completions", json={"model": "demo", **body, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


def test_sampled_beams_with_top_k_over_20_are_refused(api: Api) -> None:
    answer = api.http.post("/v1/completions", json={"model": "demo", **DRAWN, "top_k": 21})
    assert answer.status_code == 400
    assert "21 is not allowed where beam_sample draws the beams; allowed: at most 20" in answer.text
