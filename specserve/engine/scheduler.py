"""vLLM's scheduler, without drafts that nobody drafted."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class DraftScheduler(Scheduler):
    """Schedules for verification what was drafted, and nothing else.

    vLLM fills a request that comes with one token to compute, such as a prompt of which all but one
    is in the prefix cache, with ``num_spec_tokens`` placeholders, so that all requests of a step
    have as many as its CUDA graphs want. Ours have drafts of any length, so nothing is gained; the
    placeholders are verified for nothing, and their rows know no ``logit_bias`` and no ``min_p``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With a table of lengths by batch size there is no such length, and vLLM fills nothing.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
