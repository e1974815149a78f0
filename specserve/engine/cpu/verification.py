"""Verifies drafts without probabilities on CPU, with one random number for each draft token.

vLLM's rejection sampler (arXiv 2211.17192) accepts a draft token with its target probability. It
also draws a replacement for every draft token, with a random number for each token of the
vocabulary. Here every position is sampled from the target. Draft tokens are accepted up to the
first that differs from the sampled token, which replaces it. For drafts without probabilities the
distribution is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import GREEDY_TEMPERATURE, PLACEHOLDER_TOKEN_ID

from specserve.core.types import Int64Array


def verify_by_drawing() -> None:
    """Replaces the verification in vLLM's rejection sampler, in this process."""
    rejection_sampler.rejection_sample = _rejection_sample


def _rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    **unused: Any,
) -> torch.Tensor:
    """vLLM's function of this name, for n requests with m draft tokens.

    Args:
        draft_token_ids: int32 ``[m]``.
        num_draft_tokens: n draft lengths.
        max_spec_len: longest draft of a request.
        cu_num_draft_tokens: int32 ``[n]``, cumulative draft lengths.
        draft_probs: unused; the hook's drafts have none.
        target_logits: float32 ``[m, vocab_size]``, after all of the request's parameters.
        bonus_token_ids: int64 ``[n, 1]``, sampled after each draft's last token.
        unused: arguments for vLLM's own drafts.

    Returns:
        int32 ``[n, max_spec_len + 1]``: accepted tokens and one more, then -1.
    """
    counts = np.array(num_draft_tokens)
    drawn = _draw(target_logits, counts, sampling_metadata).numpy()
    is_wrong = drawn != draft_token_ids.numpy()
    num_wrong = np.concatenate([[0], np.cumsum(is_wrong)])
    ends = cu_num_draft_tokens.numpy()
    starts = ends - counts
    requests = np.repeat(np.arange(len(counts)), counts)
    (emitted,) = (num_wrong[:-1] == num_wrong[starts[requests]]).nonzero()
    rows = requests[emitted]
    is_right = num_wrong[ends] == num_wrong[starts]
    found = np.full((len(counts), max_spec_len + 1), PLACEHOLDER_TOKEN_ID, np.int32)
    found[rows, emitted - starts[rows]] = drawn[emitted]
    found[is_right, counts[is_right]] = bonus_token_ids[is_right, 0].numpy()
    return torch.from_numpy(found)


def _draw(
    logits: torch.Tensor, counts: Int64Array, sampling_metadata: SamplingMetadata
) -> torch.Tensor:
    """Samples a token for each row: int64 ``[m]``, the most_likely one for greedy requests."""
    if sampling_metadata.all_greedy:
        return logits.argmax(-1)
    temperatures = sampling_metadata.temperature
    assert temperatures is not None
    is_random = np.repeat(temperatures.numpy() != GREEDY_TEMPERATURE, counts)
    places = rejection_sampler.generate_uniform_probs(
        len(logits), counts.tolist(), sampling_metadata.generators, logits.device
    )
    drawn = torch.empty(len(logits), dtype=torch.int64)
    greedy, random = (torch.from_numpy(each.nonzero()[0]) for each in (~is_random, is_random))
    drawn[greedy] = logits[greedy].argmax(-1)
    cumulative = logits[random].softmax(-1).cumsum(-1, dtype=torch.float64)
    sought = (places[random] * cumulative[:, -1]).unsqueeze(1)
    found = torch.searchsorted(cumulative, sought, right=True).squeeze(1)
    drawn[random] = found.clamp_(max=logits.shape[1] - 1)
    return drawn
