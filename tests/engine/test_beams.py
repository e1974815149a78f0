"""Sampled beam search, with vLLM's request and output classes and a tiny model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams

from specserve.engine.beams import Drawing, draw, extend_beam_search, warped
from specserve.engine.tenants import IN_BEAM_SEARCH, stamp_controls

EOS, PROMPT = 0, [3, 4]
VOCAB = 6
WIDTH = 3


@pytest.fixture(autouse=True)
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The learned texts: tokens, number of prompt tokens, adapter, and when they began."""
    for request_class in (CompletionRequest, ChatCompletionRequest):
        theirs = request_class.to_beam_search_params
        monkeypatch.setattr(request_class, "to_beam_search_params", theirs)
    monkeypatch.setattr(BeamSearchOnlineMixin, "beam_search", BeamSearchOnlineMixin.beam_search)
    texts = []

    async def learn(*text: Any) -> None:
        texts.append(text)

    extend_beam_search(VOCAB, learn)
    return texts


class Front(BeamSearchOnlineMixin):  # type: ignore[misc]
    """A model whose next token depends only on the last token and the length."""

    def __init__(self, finish_reason: str = "length") -> None:
        self.admitted: list[int] = []
        self.renderer: Any = SimpleNamespace(
            get_tokenizer=lambda: SimpleNamespace(
                eos_token_id=EOS, decode=lambda tokens, **_: " ".join(map(str, tokens))
            )
        )
        self.engine_client: Any = SimpleNamespace(
            input_processor=SimpleNamespace(resolve_watermarking=lambda _: None),
            generate=self._generate,
            check_admission=lambda n, request_id: self.admitted.append(n),
        )
        self._finish_reason = finish_reason
        self.ids: list[str] = []
        self.are_admitted: list[bool] = []
        self.extra_args: list[dict[str, object]] = []

    async def _generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        self.ids.append(request_id)
        self.are_admitted.append(IN_BEAM_SEARCH.get())
        sent = SimpleNamespace(sampling_params=params.clone())
        stamp_controls(sent, {"learn": 1})
        self.extra_args.append(sent.sampling_params.extra_args)
        candidates = {
            token: Logprob(score)
            for token, score in enumerate(next_logprobs(prompt["prompt_token_ids"]).tolist())
        }
        yield SimpleNamespace(
            outputs=[SimpleNamespace(finish_reason=self._finish_reason, logprobs=[candidates])]
        )


def next_logprobs(tokens: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * tokens[-1] + len(tokens))
    return torch.randn(VOCAB, generator=generator).log_softmax(-1)


def params_of(**asked: Any) -> BeamSearchParams:
    body = {"prompt": "a", "use_beam_search": True, "n": WIDTH, "max_tokens": 4, "temperature": 1.0}
    request = CompletionRequest(**(body | {"vllm_xargs": {"beam_sample": 1}} | asked))
    return request.to_beam_search_params(request.max_tokens, {})


def beams_of(
    params: BeamSearchParams, front: Front | None = None, lora: Any = None
) -> RequestOutput:
    async def run() -> list[RequestOutput]:
        prompt: Any = {"type": "token", "prompt_token_ids": PROMPT}
        search = (front or Front()).beam_search(prompt, "cmpl-1", params, lora_request=lora)
        found = [output async for output in search]
        assert not IN_BEAM_SEARCH.get()
        return found

    (output,) = asyncio.run(run())
    return output


@pytest.mark.parametrize("xargs", [{}, {"beam_sample": 1}])
def test_steps_of_an_admitted_search_are_admitted(xargs: dict[str, Any]) -> None:
    front = Front()
    beams_of(params_of(vllm_xargs=xargs), front)
    assert front.admitted == [WIDTH]
    assert len(front.are_admitted) > WIDTH
    assert all(front.are_admitted)


def test_candidates_are_those_that_transformers_keeps() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logprobs = next_logprobs(PROMPT)
    candidates = {token: Logprob(score) for token, score in enumerate(logprobs.tolist())}
    for temperature, top_k, top_p in ((0.7, 4, 0.8), (1.5, 6, 0.5), (1.0, 2, 1.0)):
        kept = logprobs[None]
        for warper in (
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ):
            kept = warper(None, kept)
        wanted = kept.log_softmax(-1)[0]
        found = warped(candidates, Drawing(temperature, top_k, top_p, None))
        assert {token for token, _ in found} == set(wanted.isfinite().nonzero()[:, 0].tolist())
        for token, score in found:
            assert score == pytest.approx(wanted[token].item(), abs=1e-5)


def test_pairs_are_drawn_without_replacement_by_their_probabilities() -> None:
    scores = np.log([0.4, 0.3, 0.2, 0.1])
    generator = np.random.default_rng(1)
    drawn = Counter(tuple(draw(scores, 2, generator)) for _ in range(20_000))
    for (first, second), number in drawn.items():
        wanted = np.exp(scores[first]) * np.exp(scores[second]) / (1 - np.exp(scores[first]))
        assert number / 20_000 == pytest.approx(wanted, abs=0.012)
    assert len(drawn) == 12


def test_the_beams_are_vllms_if_all_candidates_are_drawn() -> None:
    asked = {"max_tokens": 1, "ignore_eos": True}
    assert 2 * WIDTH == VOCAB
    drawn = beams_of(params_of(**asked))
    best = beams_of(params_of(**asked, vllm_xargs=None))
    for ours, theirs in zip(drawn.outputs, best.outputs, strict=True):
        assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob)
        assert ours.logprobs == theirs.logprobs


def test_a_seed_determines_the_beams() -> None:
    texts = [beams_of(params_of(seed=seed)).outputs[0].text for seed in (1, 1, *range(2, 12))]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 2


def test_an_answer_has_texts_scores_and_finish_reasons_like_vllms() -> None:
    output = beams_of(params_of(seed=3, max_tokens=6))
    assert len(output.outputs) == WIDTH
    for index, each in enumerate(output.outputs):
        assert each.index == index
        assert each.text == " ".join(map(str, each.token_ids))
        assert EOS not in each.token_ids
        assert each.finish_reason == ("stop" if len(each.token_ids) < 6 else "length")
        tokens = [*PROMPT, *each.token_ids, *([EOS] if each.finish_reason == "stop" else [])]
        score = sum(
            next_logprobs(tokens[:end])[tokens[end]].item()
            for end in range(len(PROMPT), len(tokens))
        )
        assert each.cumulative_logprob == pytest.approx(score, abs=1e-4)
    assert {each.finish_reason for each in output.outputs} == {"stop", "length"}


@pytest.mark.parametrize("xargs", [None, {"beam_sample": 1}])
@pytest.mark.parametrize(("lora", "adapter"), [(None, ""), ("sql", "sql")])
def test_only_the_best_text_is_learned(
    xargs: Any, lora: str | None, adapter: str, learned: list[Any]
) -> None:
    request = SimpleNamespace(lora_name=lora) if lora else None
    before = time.time()
    output = beams_of(params_of(vllm_xargs=xargs), lora=request)
    text = [*PROMPT, *output.outputs[0].token_ids]
    [(*taught, began)] = learned
    assert taught == [text, len(PROMPT), adapter]
    assert before <= began < time.time()


def test_a_negative_seed_is_allowed_as_elsewhere() -> None:
    first, second = (beams_of(params_of(seed=-5)) for _ in range(2))
    assert [each.token_ids for each in first.outputs] == [each.token_ids for each in second.outputs]


@pytest.mark.parametrize("xargs", [None, {"beam_sample": 1}])
@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_request_that_fails_ends_the_search(reason: str, xargs: Any, learned: list[Any]) -> None:
    front = Front(reason)
    output = beams_of(params_of(vllm_xargs=xargs), front)
    assert [each.finish_reason for each in output.outputs] == [reason]
    assert len(front.ids) == 1
    assert learned == []


@pytest.mark.parametrize("xargs", [None, {"beam_sample": 1}])
def test_beam_requests_are_not_learned_and_get_no_drafts(xargs: Any) -> None:
    front = Front()
    beams_of(params_of(vllm_xargs=xargs), front)
    assert len(front.extra_args) > WIDTH
    assert all(each == {"speculation": "off", "learn": 0} for each in front.extra_args)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"top_k": 7}, "7 is not allowed where beam_sample draws the beams; allowed: at most 6"),
        (
            {"temperature": 0},
            "0.0 is not allowed where beam_sample draws the beams; allowed: from 0.01",
        ),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_unsupported_sampling_parameters_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(VLLMValidationError, match=said):
        params_of(**asked)


@pytest.mark.parametrize("xargs", [None, {"beam_sample": 1}])
@pytest.mark.parametrize("penalty", [-6e15, 1e4, 32.1, float("nan"), float("inf")])
def test_a_length_penalty_out_of_range_is_refused(
    penalty: float, xargs: dict[str, Any] | None
) -> None:
    with pytest.raises(VLLMValidationError, match="is not allowed; allowed: from -32 to 32"):
        params_of(length_penalty=penalty, vllm_xargs=xargs)


@pytest.mark.parametrize("xargs", [None, {"beam_sample": 1}])
@pytest.mark.parametrize("penalty", [-32, 32])
def test_length_penalty_limits_are_accepted(penalty: float, xargs: dict[str, Any] | None) -> None:
    output = beams_of(params_of(length_penalty=penalty, vllm_xargs=xargs))
    assert len(output.outputs) == WIDTH


def test_the_checkpoints_top_k_is_cut_to_the_engines_max_logprobs() -> None:
    body = {"prompt": "a", "use_beam_search": True, "max_tokens": 4, "temperature": 1.0}
    request = CompletionRequest(**body, vllm_xargs={"beam_sample": 1})
    assert request.to_beam_search_params(4, {"top_k": 64}).drawing.top_k == VOCAB


def test_only_requests_that_ask_for_it_sample_their_beams() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "use_beam_search": True, "n": 2}
    chat = ChatCompletionRequest(**body, vllm_xargs={"beam_sample": 1}, top_k=4)
    assert chat.to_beam_search_params(3, {}).drawing.top_k == 4
    assert not hasattr(ChatCompletionRequest(**body).to_beam_search_params(3, {}), "drawing")
    assert not hasattr(params_of(vllm_xargs={"beam_sample": 0}), "drawing")


def test_more_beams_than_the_engine_has_candidates_for_are_refused() -> None:
    assert params_of(n=VOCAB // 2, vllm_xargs=None).beam_width == VOCAB // 2
    with pytest.raises(VLLMValidationError, match="n: 4 beams are not allowed; allowed: at most 3"):
        params_of(n=VOCAB // 2 + 1, vllm_xargs=None)
