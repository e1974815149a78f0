"""vLLM's samplers, in which no request's parameters change what another request of the step gets.

In vLLM 0.32 two parameters do.

- ``logprob_token_ids``: a step reports the most likely tokens of all rows or the asked tokens of
  some, never both. The rejection sampler wants whole rows, and fails where it gets asked tokens.
- ``thinking_token_budget``: the row in which the end of thinking is forced is counted in draft
  tokens. In a step without drafts that is the first row, whoever's it is. In a step with drafts a
  request whose prompt is not read to its end counts as told to end, and is not told again.

A request with a budget has no drafts (:mod:`specserve.engine.sampling`), so it has one row in each
step, as without speculation. Where vLLM drafts by itself it has, and vLLM's budgets are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

ALL_LOGPROBS = -1
"""vLLM's sampler then reports those of the whole vocabulary, in the vocabulary's order."""


class AskedTokensSampler(Sampler):
    """Samples one token a request; also the last token of each in a step with drafts."""

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """vLLM's method; ``predict_bonus_token`` says that the step has drafts."""
        asked = asked_tokens(sampling_metadata)
        wanted = ALL_LOGPROBS if asked else sampling_metadata.max_num_logprobs
        output = super().forward(
            logits,
            replace(sampling_metadata, logprob_token_ids=None, max_num_logprobs=wanted),
            predict_bonus_token,
            logprobs_mode_override,
        )
        if predict_bonus_token or not asked:
            return output  # the rejection sampler gathers from all of them
        logprobs = output.logprobs_tensors.logprobs
        most_likely = self.gather_logprobs(
            logprobs,
            sampling_metadata.max_num_logprobs or 0,
            output.sampled_token_ids.flatten().long(),
        )
        rows = list(asked)
        output.logprobs_tensors = with_asked_tokens(
            most_likely, rows, list(asked.values()), logprobs[rows]
        )
        return output


class IndependentSampler(AskedTokensSampler):
    """The same, with the budgets of requests that have no drafts."""

    def apply_logits_processors(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool,
    ) -> torch.Tensor:
        """vLLM's method."""
        logits = super().apply_logits_processors(
            logits, without_budgets(sampling_metadata), predict_bonus_token
        )
        holder = sampling_metadata.thinking_budget_state_holder
        if holder is None or not holder.has_tracked_requests():
            return logits
        holder.in_spec_mode = False
        holder.update_state(sampling_metadata.output_token_ids, spec_token_ids=None)
        forced: torch.Tensor = holder.apply_to_logits(
            logits, predict_bonus_token=False, spec_token_ids=None
        )
        return forced


class AskedTokensRejectionSampler(RejectionSampler):
    """Verifies the drafts of a step. Its sampler is an :class:`AskedTokensSampler`."""

    _asked: dict[int, list[int]]
    """``logprob_token_ids`` of the step at hand."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """vLLM's method."""
        self._asked = asked_tokens(sampling_metadata)
        if self._asked and sampling_metadata.max_num_logprobs is None:
            sampling_metadata = replace(sampling_metadata, max_num_logprobs=0)
        return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def _get_logprobs_tensors(
        self,
        max_num_logprobs: int,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        sampled_token_ids: torch.Tensor,
    ) -> LogprobsTensors:
        most_likely = super()._get_logprobs_tensors(
            max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids
        )
        if not self._asked:
            return most_likely
        final = torch.empty_like(logits, dtype=torch.float32)
        final[metadata.target_logits_indices] = target_logits.float()
        final[metadata.bonus_logits_indices] = bonus_logits.float()
        rows, sources, tokens = [], [], []
        start, width = 0, sampled_token_ids.shape[-1]
        for request, num_drafts in enumerate(metadata.num_draft_tokens):
            if asked := self._asked.get(request):
                positions = range(num_drafts + 1)
                rows += [request * width + position for position in positions]
                sources += [start + position for position in positions]
                tokens += [asked for _ in positions]
            start += num_drafts + 1
        chosen = final[sources]
        logprobs = chosen if self.is_logits_logprobs_mode else self.sampler.compute_logprobs(chosen)
        return with_asked_tokens(most_likely, rows, tokens, logprobs)


class IndependentRejectionSampler(AskedTokensRejectionSampler):
    """The same without budgets. Its sampler is an :class:`IndependentSampler`, which keeps them."""

    def apply_logits_processors(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        metadata: SpecDecodeMetadata,
    ) -> torch.Tensor:
        """vLLM's method, for the drafts' logits."""
        processed: torch.Tensor = super().apply_logits_processors(
            logits, without_budgets(sampling_metadata), metadata
        )
        return processed


def asked_tokens(sampling_metadata: SamplingMetadata) -> dict[int, list[int]]:
    """``logprob_token_ids`` by row; an empty list asks for none."""
    asked = sampling_metadata.logprob_token_ids or {}
    return {row: tokens for row, tokens in asked.items() if tokens}


def without_budgets(sampling_metadata: SamplingMetadata) -> SamplingMetadata:
    """The same without thinking budgets."""
    return replace(sampling_metadata, thinking_budget_state_holder=None)


def with_asked_tokens(
    most_likely: LogprobsTensors,
    rows: Sequence[int],
    tokens: Sequence[Sequence[int]],
    logprobs: torch.Tensor,
) -> LogprobsTensors:
    """Log-probabilities of the asked tokens in some rows and of the most likely in the others.

    Args:
        most_likely: ``[num_rows, 1 + k]``; column 0 is the sampled token's.
        rows: R of these rows, whose requests ask for tokens.
        tokens: R lists of token ids, of any lengths.
        logprobs: ``[R, vocab_size]``, of the same rows.

    Returns:
        ``[num_rows, 1 + max(k, longest list)]``. A request reads as many columns as it asked for.
    """
    device = logprobs.device
    longest = max(map(len, tokens))
    padded = torch.tensor([[*each, *[0] * (longest - len(each))] for each in tokens], device=device)
    index = torch.tensor(rows, device=device)
    token_ids, values, ranks, *_ = most_likely
    if (missing := 1 + longest - token_ids.shape[1]) > 0:
        token_ids = pad(token_ids, (0, missing))
        values = pad(values, (0, missing), value=float("-inf"))
    token_ids[index, 1 : 1 + longest] = padded.to(token_ids.dtype)
    values[index, 1 : 1 + longest] = logprobs.gather(1, padded)
    return LogprobsTensors(token_ids, values, ranks)
