"""Steps of many requests with drafts, scheduled by vLLM's scheduler with ours around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from specserve.core.config import parse
from specserve.engine.args import served_engine_args
from specserve.engine.scheduler import DraftScheduler
from tests.integration.cluster import model_path

BLOCK, NUM_BLOCKS = 16, 400


@pytest.fixture
def scheduler() -> DraftScheduler:
    """At most 8 requests and 32 tokens a step."""
    engine = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    config = served_engine_args(
        parse(
            {
                "model": {"path": str(model_path("demo-draft"))},
                "engine": engine | {"vllm": {"enable_prefix_caching": False}},
                "speculation": [{"kind": "ngram", "max_draft_len": 16}],
            }
        )
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    return DraftScheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=manager,
        block_size=BLOCK,
    )


@pytest.fixture
def memory_for_12_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.engine.scheduler.MAX_STEP_DRAFT_TOKENS", 12)


def add(scheduler: DraftScheduler, name: str, prompt_len: int = 2, **params: Any) -> None:
    prompt = list(range(2, 2 + prompt_len))
    scheduler.add_request(Request(name, prompt, SamplingParams(max_tokens=99, **params), None))


def step(scheduler: DraftScheduler, **draft_lengths: int) -> dict[str, int]:
    """Schedules a step, and gives each request whose prompt is read a token and its next draft.

    Returns:
        The tokens that the step computes, by request.
    """
    scheduled = scheduler.schedule()
    names = list(scheduled.num_scheduled_tokens)
    is_reading = [scheduler.requests[name].is_prefill_chunk for name in names]
    output: Any = ModelRunnerOutput(
        names,
        {name: row for row, name in enumerate(names)},
        sampled_token_ids=[[] if each else [7] for each in is_reading],
    )
    scheduler.update_from_output(scheduled, output)
    drafts = [[8] * length for length in draft_lengths.values()]
    scheduler.update_draft_token_ids(DraftTokenIds(list(draft_lengths), drafts))
    return dict(scheduled.num_scheduled_tokens)


def test_drafts_that_fit_are_not_cut(scheduler: DraftScheduler) -> None:
    for name in "ab":
        add(scheduler, name)
    step(scheduler, a=14, b=16)
    assert step(scheduler) == {"a": 15, "b": 17}


def test_long_drafts_leave_a_token_for_every_running_request(scheduler: DraftScheduler) -> None:
    for name in "abcd":
        add(scheduler, name)
    step(scheduler, a=16, b=16, c=3, d=16)
    assert step(scheduler) == {"a": 9, "b": 9, "c": 4, "d": 9}


def test_long_drafts_leave_tokens_for_waiting_prompts(scheduler: DraftScheduler) -> None:
    for name in "ab":
        add(scheduler, name)
    step(scheduler, a=16, b=16)
    add(scheduler, "c", prompt_len=40)
    assert step(scheduler, a=16, b=16) == {"a": 8, "b": 8, "c": 16}
    assert step(scheduler, a=16, b=16) == {"a": 8, "b": 8, "c": 16}
    assert step(scheduler) == {"a": 8, "b": 8, "c": 8}


@pytest.mark.usefixtures("memory_for_12_draft_tokens")
def test_a_step_verifies_no_more_draft_tokens_than_memory_is_kept_for(
    scheduler: DraftScheduler,
) -> None:
    for name in "ab":
        add(scheduler, name)
    step(scheduler, a=3, b=14)
    assert step(scheduler) == {"a": 4, "b": 10}


@pytest.mark.usefixtures("memory_for_12_draft_tokens")
@pytest.mark.parametrize("params", [{"logprobs": 1}, {"logprob_token_ids": [3]}])
def test_drafts_are_shorter_where_log_probabilities_need_rows_of_equal_number(
    scheduler: DraftScheduler, params: dict[str, Any]
) -> None:
    add(scheduler, "a")
    add(scheduler, "b", **params)
    step(scheduler, a=3, b=9)
    assert step(scheduler) == {"a": 4, "b": 7}


@pytest.mark.usefixtures("memory_for_12_draft_tokens")
def test_a_waiting_request_with_log_probabilities_counts_too(scheduler: DraftScheduler) -> None:
    for name in "ab":
        add(scheduler, name)
    step(scheduler, a=3, b=9)
    add(scheduler, "c", logprobs=1)
    assert step(scheduler) == {"a": 4, "b": 5, "c": 2}


@pytest.mark.usefixtures("memory_for_12_draft_tokens")
def test_all_requests_that_may_start_with_log_probabilities_count(
    scheduler: DraftScheduler,
) -> None:
    scheduler.max_num_scheduled_tokens = 99  # room for all that is drafted
    add(scheduler, "a")
    step(scheduler, a=11)
    for name in "bcdefghij":  # eight run at most
        add(scheduler, name, logprobs=1)
    assert step(scheduler)["a"] == 1 + 12 // 8


def test_drafts_are_not_halved_for_prompts_that_cannot_start(scheduler: DraftScheduler) -> None:
    names = "abcdefgh"  # as many as may run
    for name in names:
        add(scheduler, name)
    step(scheduler)
    add(scheduler, "waiting")
    step(scheduler, **dict.fromkeys(names, 16))
    assert step(scheduler) == dict.fromkeys(names, 4)


def test_no_draft_is_sent_where_a_step_has_too_few_tokens_anyway(
    scheduler: DraftScheduler,
) -> None:
    scheduler.max_num_scheduled_tokens = 3
    for name in "abcd":
        add(scheduler, name, prompt_len=1)
    step(scheduler)
    step(scheduler, a=16, b=16, c=16)
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}
