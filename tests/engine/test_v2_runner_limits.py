"""Requests that vLLM's V2 model runner has no room for, beside the runner's own classes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import bad_words, logit_bias, states

from specserve.engine.v2_runner_limits import check_before_sending, check_sizes


class Buffer:
    """An array on the GPU, for a single request."""

    def __init__(self, *_: Any, **options: Any) -> None:
        kind = {"torch.int32": np.int32, "torch.int64": np.int64}
        self.np = np.zeros(1, dtype=kind.get(str(options.get("dtype")), np.float32))

    def stage_write(self, *_: Any) -> None:
        pass

    def copy_to_uva(self) -> None:
        pass


def add_to_runner(monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> None:
    """Gives a request's parameters to the classes that end the engine by an error."""
    for module in (bad_words, logit_bias, states):
        for name in ("UvaBackedTensor", "StagedWriteTensor"):
            monkeypatch.setattr(module, name, Buffer, raising=False)
    of_requests: Any = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.ones(1, dtype=np.int32)), max_num_reqs=1, device="cpu"
    )
    config: Any = None
    logit_bias.LogitBiasState(config, of_requests).add_request(0, params)
    bad_words.BadWordsState(config, of_requests).add_request(0, params)
    states.SamplingStates(max_num_reqs=1, vocab_size=5000).add_request(0, params)


def made(bad: list[list[int]] | None = None, **options: Any) -> SamplingParams:
    params = SamplingParams(**options)
    params._bad_words_token_ids = bad
    return params


@pytest.mark.parametrize(
    "fitting",
    [
        made(),
        made(allowed_token_ids=list(range(1024))),
        made(logit_bias=dict.fromkeys(range(1024), 1.0)),
        made(stop_token_ids=list(range(128)), min_tokens=1),
        made(stop_token_ids=list(range(200))),
        made(bad=[[1]] * 128),
        made(bad=[[1] * 1024]),
        made(seed=2**63 - 1),
        made(seed=-(2**63)),
    ],
)
def test_what_the_runner_takes_is_sent(
    monkeypatch: pytest.MonkeyPatch, fitting: SamplingParams
) -> None:
    add_to_runner(monkeypatch, fitting)
    check_sizes(fitting)


@pytest.mark.parametrize(
    ("large", "field", "size"),
    [
        (made(allowed_token_ids=list(range(1025))), "allowed_token_ids", 1025),
        (made(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias", 1025),
        (made(stop_token_ids=list(range(129)), min_tokens=1), "stop_token_ids", 129),
        (made(bad=[[1]] * 129), "bad_words", 129),
        (made(bad=[[1] * 1025]), "bad_words", 1025),
        (made(seed=2**63), "seed", 2**63),
    ],
)
def test_what_would_end_the_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, large: SamplingParams, field: str, size: int
) -> None:
    with pytest.raises((ValueError, OverflowError)):
        add_to_runner(monkeypatch, large)
    with pytest.raises(VLLMValidationError, match=f"{field}.* at most .*, got {size}"):
        check_sizes(large)


def test_a_refused_request_is_not_sent() -> None:
    sent: list[Any] = []

    async def send(request: Any) -> None:
        sent.append(request)

    client = SimpleNamespace(add_request_async=send)
    check_before_sending(client)
    fitting, pooling = (SimpleNamespace(sampling_params=params) for params in (made(), None))
    for request in (fitting, pooling):
        asyncio.run(client.add_request_async(request))
    with pytest.raises(VLLMValidationError):
        asyncio.run(client.add_request_async(SimpleNamespace(sampling_params=made(seed=2**63))))
    assert sent == [fitting, pooling]
