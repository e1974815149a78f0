"""vLLM's samplers, changed so that no request's parameters affect other requests of the step.

In vLLM 0.32 two parameters affect other requests.

- ``logprob_token_ids``: a step reports the most likely tokens of all rows or the requested tokens
  of some rows, never both. The rejection sampler fails on requested tokens.
- ``thinking_token_budget``: vLLM counts draft tokens to find the row that must end thinking. In a
  step without drafts this is always the first row, also if it belongs to another request. In a
  step with drafts, a request in prefill is marked as forced and is not forced again.

A request with a budget has no drafts (:mod:`specserve.engine.sampling`), so it has one row a step,
as without speculation. With vLLM's own draft methods it has drafts, and vLLM's code is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class AskedTokensSampler(Sampler):
    """Samples one token for each request; in a step with drafts, the bonus token."""

    _asked: dict[int, list[int]] | None = None
    """``logprob_token_ids`` of the current step, by the request's index in the batch."""
    _num_requests: int

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """vLLM's method; ``predict_bonus_token`` means that the step has drafts."""
        if predict_bonus_token:  # the rejection sampler has called `reporting`
            return super().forward(
                logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )
        with self.reporting(sampling_metadata, len(logits)) as others:
            return super().forward(logits, others, predict_bonus_token, logprobs_mode_override)

    @contextmanager
    def reporting(
        self, sampling_metadata: SamplingMetadata, num_requests: int
    ) -> Iterator[SamplingMetadata]:
        """Context in which requested tokens are reported. Yields the metadata without them."""
        by_request = sampling_metadata.logprob_token_ids or {}
        asked = {request: tokens for request, tokens in by_request.items() if tokens}
        number = sampling_metadata.max_num_logprobs
        if asked and number is None:
            number = 0
        self._asked, self._num_requests = asked, num_requests
        try:
            yield replace(sampling_metadata, logprob_token_ids=None, max_num_logprobs=number)
        finally:
            self._asked = None

    def gather_logprobs(
        self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """Log-probabilities to report: of requested tokens, or of the most likely ones.

        Replaces vLLM's method, which the rejection sampler calls too.

        Args:
            logprobs: ``[num_requests * width, vocab_size]``, ``width`` rows of each request.
            num_logprobs: k, number of most likely tokens, for requests that name no tokens.
            token_ids: ``[num_requests * width]``, the sampled tokens, for column 0.

        Returns:
            Tensors ``[num_requests * width, 1 + max(k, longest list)]``. vLLM reads only as many
            columns of a row as its request asked for.
        """
        most_likely = super().gather_logprobs(logprobs, num_logprobs, token_ids)
        if not self._asked:
            return most_likely
        tokens, values, ranks, *_ = most_likely
        requests = torch.tensor(list(self._asked), device=logprobs.device)
        lists = [torch.tensor(each) for each in self._asked.values()]
        asked = pad_sequence(lists, batch_first=True).to(logprobs.device)
        columns = slice(1, 1 + asked.shape[1])
        if (missing := columns.stop - tokens.shape[1]) > 0:
            tokens = pad(tokens, (0, missing))
            values = pad(values, (0, missing), value=float("-inf"))
        by_request = self._num_requests, -1, tokens.shape[1]
        of_these = logprobs.view(self._num_requests, -1, logprobs.shape[1])[requests]
        asked = asked[:, None].expand(-1, of_these.shape[1], -1)
        tokens.view(by_request)[requests, :, columns] = asked.to(tokens.dtype)
        values.view(by_request)[requests, :, columns] = of_these.gather(2, asked)
        return LogprobsTensors(tokens, values, ranks)


class IndependentSampler(AskedTokensSampler):
    """Also applies thinking budgets, for requests that have no drafts."""

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
    """vLLM's rejection sampler; its sampler is an :class:`AskedTokensSampler`."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """vLLM's method."""
        with self.sampler.reporting(sampling_metadata, len(metadata.num_draft_tokens)) as others:
            return super().forward(metadata, draft_probs, logits, others)


class IndependentRejectionSampler(AskedTokensRejectionSampler):
    """Leaves thinking budgets to its sampler, an :class:`IndependentSampler`."""

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


def without_budgets(sampling_metadata: SamplingMetadata) -> SamplingMetadata:
    """A copy of the metadata without thinking budgets."""
    return replace(sampling_metadata, thinking_budget_state_holder=None)
