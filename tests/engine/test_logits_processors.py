from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from specserve.engine.logits_processors import (
    PROCESSORS,
    TypicalSampling,
    Watermark,
    are_asked_for,
    extra_args,
)
from specserve.engine.sampling import is_kept_without_drafts_only
from specserve.engine.text_request import Parameters

VOCABULARY = 64


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, extra_args=extra_args(Parameters(**fields)) or None)


def applied(
    kind: type[LogitsProcessor],
    logits: torch.Tensor,
    *requests: SamplingParams,
    output: list[int] | None = None,
) -> torch.Tensor:
    """The logits of a batch of requests, whose prompt ends with 7."""
    processor = kind(VllmConfig(), torch.device("cpu"), False)
    added = [(row, each, [3, 7], output or []) for row, each in enumerate(requests)]
    processor.update_state(BatchUpdate(len(requests), [], added, []))
    changed: torch.Tensor = processor.apply(logits.clone())
    return changed


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3


def test_requests_without_these_parameters_keep_their_logits(logits: torch.Tensor) -> None:
    for kind in PROCESSORS:
        assert torch.equal(applied(kind, logits, params(), params(top_p=0.5), params()), logits)


def test_typical_sampling_follows_top_k_and_top_p_and_changes_only_its_row(
    logits: torch.Tensor,
) -> None:
    asked = params(top_k=20, top_p=0.9, typical_p=0.3)
    found = applied(TypicalSampling, logits, params(), asked, params())
    row: Any = logits[1:2]
    for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.9), TypicalLogitsWarper(0.3)):
        row = warper(None, row)
    assert torch.equal(found[1:2], row)
    assert torch.equal(found[::2], logits[::2])
    assert 0 < torch.isfinite(found[1]).sum() < 20


def test_typical_sampling_may_leave_the_most_likely_token_out() -> None:
    # One token has 30 % of the probability. The many rare tokens are the typical ones.
    logits = torch.log(torch.tensor([[0.3, *[0.7 / 100] * 100]]))
    kept = torch.isfinite(applied(TypicalSampling, logits, params(typical_p=0.5)))[0]
    assert not kept[0]
    assert kept[1:].any()


def green(previous: int, vocabulary: int) -> set[int]:
    """Text Generation Inference's list: half of a permutation that the previous token seeds."""
    generator = torch.Generator().manual_seed(15485863 * previous)
    permutation = torch.randperm(vocabulary, generator=generator)
    return set(permutation[: vocabulary // 2].tolist())


@pytest.mark.parametrize(("output", "previous"), [([], 7), ([5, 9], 9)])
def test_the_watermark_favours_tokens_chosen_by_the_previous_token(
    logits: torch.Tensor, output: list[int], previous: int
) -> None:
    marked = params(watermark=True)
    found = applied(Watermark, logits, params(), marked, params(), output=output)
    added = found - logits
    favoured = {token for token in range(VOCABULARY) if added[1, token] > 1}
    assert favoured == green(previous, VOCABULARY)
    assert torch.allclose(added[1, sorted(favoured)], torch.tensor(2.0))
    assert torch.equal(found[::2], logits[::2])


def test_the_watermark_follows_the_output_as_it_grows(logits: torch.Tensor) -> None:
    processor = Watermark(VllmConfig(), torch.device("cpu"), False)
    output: list[int] = []
    processor.update_state(BatchUpdate(1, [], [(0, params(watermark=True), [7], output)], []))
    first = processor.apply(logits[:1].clone())
    output.append(9)
    processor.update_state(None)
    second = processor.apply(logits[:1].clone())
    assert not torch.equal(first, second)
    assert torch.equal(second, applied(Watermark, logits[:1], params(watermark=True), output=[9]))


@pytest.mark.parametrize("fields", [{"typical_p": 0.5}, {"watermark": True}])
def test_requests_with_these_parameters_get_no_drafts(fields: dict[str, Any]) -> None:
    assert are_asked_for(params(**fields))
    assert is_kept_without_drafts_only(params(**fields))
    assert not is_kept_without_drafts_only(params())
    assert not are_asked_for(SamplingParams(extra_args={"speculation": "auto"}))
