"""Steps of many requests with drafts, scheduled by vLLM's scheduler with ours around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
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


@pytest.fixture
def first_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """Lets every new request have a draft of five tokens; records who asked, and with how many."""
    asked: list[tuple[list[str], int]] = []

    def draft_first(requests: Sequence[NewRequestData], num_requests: int) -> list[list[int]]:
        asked.append(([each.req_id for each in requests], num_requests))
        return [[7] * 5 for _ in requests]

    monkeypatch.setattr(DraftScheduler, "_draft_first", draft_first)
    return asked


def test_a_step_that_ends_a_prompt_verifies_a_first_draft(
    scheduler: DraftScheduler, first_drafts: list[tuple[list[str], int]]
) -> None:
    add(scheduler, "a", prompt_len=BLOCK)
    scheduled = scheduler.schedule()
    (new,) = scheduled.scheduled_new_reqs
    assert scheduled.scheduled_spec_decode_tokens == {"a": [7] * 5}
    assert scheduled.num_scheduled_tokens == {"a": BLOCK + 5}
    assert scheduled.total_num_scheduled_tokens == BLOCK + 5
    assert len(new.block_ids[0]) == 2
    accepted: Any = ModelRunnerOutput(["a"], {"a": 0}, sampled_token_ids=[[7, 7, 9]])
    scheduler.update_from_output(scheduled, accepted)
    request = scheduler.requests["a"]
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (BLOCK + 2, 0)
    assert list(request.output_token_ids) == [7, 7, 9]
    assert step(scheduler) == {"a": 1}
    assert first_drafts == [(["a"], 1)]


def test_first_drafts_take_the_tokens_that_a_step_has_left(
    scheduler: DraftScheduler, first_drafts: list[tuple[list[str], int]]
) -> None:
    add(scheduler, "a", prompt_len=20)
    add(scheduler, "b", prompt_len=5)
    add(scheduler, "c", prompt_len=40)
    assert step(scheduler) == {"a": 20, "b": 5, "c": 7}
    for name in "de":
        add(scheduler, name, prompt_len=1)
    assert step(scheduler) == {"a": 1, "b": 1, "c": 30}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 3, "d": 6, "e": 6}
    assert first_drafts == [(["d", "e"], 5)]


@pytest.mark.usefixtures("memory_for_12_draft_tokens")
def test_first_drafts_take_the_memory_that_other_drafts_leave(
    scheduler: DraftScheduler, first_drafts: list[tuple[list[str], int]]
) -> None:
    add(scheduler, "a")
    step(scheduler, a=9)
    add(scheduler, "b")
    assert step(scheduler) == {"a": 10, "b": 5}
    assert len(first_drafts) == 2


def test_a_first_draft_without_room_in_the_cache_is_dropped(
    scheduler: DraftScheduler, first_drafts: list[tuple[list[str], int]]
) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 1)
    add(scheduler, "a", prompt_len=BLOCK - 2)
    assert step(scheduler) == {"a": BLOCK - 2}
    assert len(first_drafts) == 1


def test_first_drafts_fit_into_the_workers_buffers(
    scheduler: DraftScheduler, first_drafts: list[tuple[list[str], int]]
) -> None:
    scheduler.max_num_scheduled_tokens = 64  # vLLM's option of this name; the buffers have 32
    add(scheduler, "a", prompt_len=30)
    assert step(scheduler) == {"a": 32}
    assert len(first_drafts) == 1


@pytest.mark.usefixtures("first_drafts")
def test_no_first_draft_takes_blocks_that_the_worker_would_zero_too_late(
    scheduler: DraftScheduler,
) -> None:
    """A cache with layers of two precisions: the worker zeroes the blocks that a step lists."""
    precisions = torch.float32, torch.bfloat16
    groups = [
        KVCacheGroupSpec(
            [str(dtype)],
            FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=dtype),
        )
        for dtype in precisions
    ]
    scheduler = DraftScheduler(
        vllm_config=scheduler.vllm_config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], groups),
        structured_output_manager=scheduler.structured_output_manager,
        block_size=BLOCK,
    )
    add(scheduler, "a", prompt_len=BLOCK)
    scheduled = scheduler.schedule()
    (new,) = scheduled.scheduled_new_reqs
    used = {block for group in new.block_ids for block in group}
    assert used
    assert used == set(scheduled.new_block_ids_to_zero)


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ],
)
def test_requests_that_a_first_draft_does_not_suit_get_none(
    scheduler: DraftScheduler,
    first_drafts: list[tuple[list[str], int]],
    params: dict[str, Any],
) -> None:
    add(scheduler, "a", **params)
    scheduler.requests["a"].status = RequestStatus.WAITING  # as if its grammar were compiled
    assert scheduler.schedule().num_scheduled_tokens == {"a": 2}
    assert first_drafts == []
