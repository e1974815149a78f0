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
    """Samples one token a request; also the last token of each in a step with drafts."""

    _asked: dict[int, list[int]] | None = None
    """``logprob_token_ids`` of the step at hand, by request."""
    _num_requests: int

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """vLLM's method; ``predict_bonus_token`` says that the step has drafts."""
        if predict_bonus_token:  # the rejection sampler has begun the step
            return super().forward(
                logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )
        with self.reporting(sampling_metadata, len(logits)) as others:
            return super().forward(logits, others, predict_bonus_token, logprobs_mode_override)

    @contextmanager
    def reporting(
        self, sampling_metadata: SamplingMetadata, num_requests: int
    ) -> Iterator[SamplingMetadata]:
        """Within it the asked tokens are reported; vLLM gets the metadata without them."""
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
        """vLLM's method, the rejection sampler's, too: the asked tokens of those requests that ask.

        Args:
            logprobs: ``[num_requests * width, vocab_size]``, ``width`` rows of each request.
            num_logprobs: k, of the most likely tokens for the others.
            token_ids: ``[num_requests * width]``, the sampled tokens, for column 0.

        Returns:
            Tensors ``[num_requests * width, 1 + max(k, longest list)]``. A request reads as many
            columns as it asked for.
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


def without_budgets(sampling_metadata: SamplingMetadata) -> SamplingMetadata:
    """The same without thinking budgets."""
    return replace(sampling_metadata, thinking_budget_state_holder=None)
