"""Has vLLM reserve GPU memory for the verification of drafts.

Before vLLM allocates the KV cache, it measures the memory of a step with dummy inputs. It verifies
one draft token for each request, and specserve's drafts have up to `max_draft_len` tokens. The
rejection sampler holds the logits of all of them several times. For 1,024 draft tokens and a
vocabulary of 152,000 that is 2.2 GB, and without room for it the engine ends.

As in vLLM, what penalties and log-probabilities take beyond that is not measured.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from specserve.engine.memory_estimate import most_draft_tokens


def profile_longest_drafts(runner: Any) -> None:
    """Makes a model runner's dummy runs verify as many draft tokens as a step may have."""
    most = most_draft_tokens(runner.max_num_reqs, runner.max_num_tokens, runner.num_spec_tokens)
    dummy_sampler_run = runner._dummy_sampler_run

    def _dummy_sampler_run(hidden_states: torch.Tensor) -> torch.Tensor:
        verify = runner.rejection_sampler

        def verify_most(
            metadata: SpecDecodeMetadata,
            draft_probs: torch.Tensor | None,
            logits: torch.Tensor,
            sampling_metadata: SamplingMetadata,
        ) -> None:
            num_requests, vocab_size = len(metadata.num_draft_tokens), logits.shape[1]
            each, rest = divmod(most, num_requests)
            drafts = [[0] * (each + (request < rest)) for request in range(num_requests)]
            longer = SpecDecodeMetadata.make_dummy(drafts, logits.device)
            logits = torch.randn(
                most + num_requests, vocab_size, device=logits.device, dtype=logits.dtype
            )
            verify(longer, None, logits, sampling_metadata)

        runner.rejection_sampler = verify_most
        try:
            output: torch.Tensor = dummy_sampler_run(hidden_states)
        finally:
            runner.rejection_sampler = verify
        return output

    runner._dummy_sampler_run = _dummy_sampler_run
