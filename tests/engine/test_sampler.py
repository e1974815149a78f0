"""The samplers of a step, on given logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.sampler import IndependentRejectionSampler, IndependentSampler
from tests.engine.sampling_metadata import drafts_metadata, install_cpu_sampling, sampling_metadata

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="run by vLLM's CPU kernels")

VOCAB_SIZE = 16
THINK, END = 14, 15


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs the CPU kernels that the workers install, and compiles nothing."""
    install_cpu_sampling(monkeypatch)
    with torch.compiler.set_stance("force_eager"):
        yield


def logits_of(tokens: Sequence[int]) -> torch.Tensor:
    """Random logits, ``[len(tokens), VOCAB_SIZE]``, with the maximum at these tokens."""
    logits = torch.randn(len(tokens), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[range(len(tokens)), list(tokens)] = 9.0
    return logits


def reported(lists: LogprobsLists, row: int, number: int) -> dict[int, float]:
    """Log-probabilities in a row: of the sampled token and of ``number`` other tokens."""
    columns = slice(0, 1 + number)
    tokens, logprobs = lists.logprob_token_ids[row, columns], lists.logprobs[row, columns]
    return dict(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def expected(logits: torch.Tensor, tokens: Sequence[int]) -> dict[int, Any]:
    logprobs = logits.log_softmax(-1)
    return {token: pytest.approx(logprobs[token].item(), abs=1e-5) for token in tokens}


def most_likely(logits: torch.Tensor, number: int) -> list[int]:
    best: list[int] = logits.topk(number).indices.tolist()
    return best


@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_with_drafts_each_request_gets_the_logprobs_it_asked_for(
    num_logprobs: int | None,
) -> None:
    # The first request accepts both draft tokens, the second has none, the last rejects its one.
    metadata = drafts_metadata([[3, 4], [], [8]])
    logits = logits_of([3, 4, 5, 6, 7, 10])
    sampler = IndependentRejectionSampler(IndependentSampler())
    output = sampler(
        metadata,
        None,
        logits.clone(),
        sampling_metadata(3, max_num_logprobs=num_logprobs, logprob_token_ids={0: [1, 2, 12]}),
    )
    tokens, lists = RejectionSampler.parse_output(
        output.sampled_token_ids, VOCAB_SIZE, (), output.logprobs_tensors
    )
    assert tokens == [[3, 4, 5], [6], [7]]
    assert lists is not None
    for row, token in enumerate([3, 4, 5]):
        assert reported(lists, row, 3) == expected(logits[row], [token, 1, 2, 12])
    number = num_logprobs or 0
    for row, token in ((3, 6), (4, 7)):
        wanted = {token, *most_likely(logits[row], max(number, 1))}
        assert reported(lists, row, number) == expected(logits[row], sorted(wanted))


def test_without_drafts_each_request_gets_the_logprobs_it_asked_for() -> None:
    logits = logits_of([3, 6])
    output = IndependentSampler()(
        logits.clone(), sampling_metadata(2, max_num_logprobs=2, logprob_token_ids={1: [1, 2, 12]})
    )
    assert output.sampled_token_ids.tolist() == [[3], [6]]
    lists = output.logprobs_tensors.tolists()
    assert reported(lists, 0, 2) == expected(logits[0], most_likely(logits[0], 2))
    assert reported(lists, 1, 3) == expected(logits[1], [6, 1, 2, 12])


@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_an_empty_list_of_logprob_tokens_asks_for_nothing(
    num_logprobs: int | None,
) -> None:
    metadata = drafts_metadata([[3, 4], []])
    logits = logits_of([3, 4, 5, 6])
    asks = sampling_metadata(2, max_num_logprobs=num_logprobs, logprob_token_ids={1: []})
    sampler = IndependentSampler()
    with_drafts = IndependentRejectionSampler(sampler)(metadata, None, logits.clone(), asks)
    plainly = sampler(logits[:2].clone(), asks)
    assert with_drafts.sampled_token_ids.tolist() == [[3, 4, 5], [6, -1, -1]]
    assert plainly.sampled_token_ids.tolist() == [[3], [4]]
    for output in (with_drafts, plainly):
        assert (output.logprobs_tensors is None) == (num_logprobs is None)


def spent_budget(row: int, thoughts: list[int]) -> ThinkingBudgetStateHolder:
    """A request in this row has a budget of two thinking tokens and wrote ``thoughts``."""
    config = SimpleNamespace(reasoning_start_token_ids=[THINK], reasoning_end_token_ids=[END])
    holder = ThinkingBudgetStateHolder(config, 4, 3, torch.device("cpu"), False)
    params = SamplingParams(thinking_token_budget=2)
    holder.sync_batch(BatchUpdate(row + 1, (), [(row, params, [THINK], thoughts)], ()))
    return holder


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_step_without_drafts_ends_thinking_at_the_requests_budget(
    row: int,
) -> None:
    tokens = [3, 4, 5]
    thoughts: list[list[int]] = [[], [], []]
    thoughts[row] = [6, 7]
    output = IndependentSampler()(
        logits_of(tokens),
        sampling_metadata(
            3,
            output_token_ids=thoughts,
            spec_token_ids=[[], [], []],
            thinking_budget_state_holder=spent_budget(row, thoughts[row]),
        ),
    )
    tokens[row] = END
    assert output.sampled_token_ids.flatten().tolist() == tokens


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_step_where_other_requests_have_drafts_ends_thinking(row: int) -> None:
    drafts: list[list[int]] = [[3], [7, 8], [5]]
    thoughts: list[list[int]] = [[], [], []]
    tokens = [[3, 4], [7, 8, 9], [5, 6]]
    drafts[row], thoughts[row], tokens[row] = [], [6, 7], [10]
    output = IndependentRejectionSampler(IndependentSampler())(
        drafts_metadata(drafts),
        None,
        logits_of([*chain(*tokens)]),
        sampling_metadata(
            3,
            output_token_ids=thoughts,
            spec_token_ids=drafts,
            thinking_budget_state_holder=spent_budget(row, thoughts[row]),
        ),
    )
    tokens[row] = [END]
    got, _ = RejectionSampler.parse_output(output.sampled_token_ids, VOCAB_SIZE)
    assert got == tokens


def test_thinking_ends_after_a_prefill_of_several_steps() -> None:
    config = SimpleNamespace(reasoning_start_token_ids=[THINK], reasoning_end_token_ids=[END])
    holder = ThinkingBudgetStateHolder(config, 4, 3, torch.device("cpu"), False)
    params = SamplingParams(thinking_token_budget=0)
    holder.sync_batch(BatchUpdate(2, (), [(1, params, [THINK], [])], ()))
    for _ in range(3):  # prefill discards all samples but the last
        output = IndependentRejectionSampler(IndependentSampler())(
            drafts_metadata([[3], []]),
            None,
            logits_of([3, 4, 5]),
            sampling_metadata(
                2,
                output_token_ids=[[], []],
                spec_token_ids=[[3], []],
                thinking_budget_state_holder=holder,
            ),
        )
        got, _ = RejectionSampler.parse_output(output.sampled_token_ids, VOCAB_SIZE)
        assert got == [[3, 4], [END]]
