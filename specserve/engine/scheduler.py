"""vLLM's scheduler, without drafts that nobody drafted and with counts by source."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from specserve.engine.report import Outcome, Reports
from specserve.sources.controls import wants_report


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
        self._reports = Reports.of(self.vllm_config)

    def add_request(self, request: Any) -> None:
        """As vLLM's; counts for a request whose answer is to tell what speculation did."""
        super().add_request(request)
        params = request.sampling_params
        if request.spec_decode_metrics is None and params and wants_report(params.extra_args):
            request.spec_decode_metrics = self._reports.begin()
        if request.spec_decode_metrics is not None:
            self._reports.make_room(request.spec_decode_metrics)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's; takes the counts by source from the output that brings the tokens."""
        outcomes = getattr(model_runner_output, "specserve_outcomes", {})
        may_end = self._count(outcomes)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if may_end:
            for output in (each for client in outputs.values() for each in client.outputs):
                if output.request_id in may_end and output.spec_decode_metrics is None:
                    # Encoded by another thread, while the next step counts.
                    output.spec_decode_metrics = copy.deepcopy(may_end[output.request_id])
        return outputs

    def _count(self, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
        """Counts drafts; returns those counts that may be the last ones, by request.

        vLLM sends counts when the engine core ends a request. One with stop strings is ended by the
        replica, at any token.
        """
        may_end = {}
        for request_id, outcome in outcomes.items():
            request = self.requests.get(request_id)
            if request is not None and request.spec_decode_metrics is not None:
                self._reports.add(request.spec_decode_metrics, outcome)
                if request.sampling_params.stop:
                    may_end[request_id] = request.spec_decode_metrics
        return may_end
