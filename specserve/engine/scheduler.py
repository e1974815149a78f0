"""vLLM's scheduler for drafts of any length, with acceptance counts by source."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from specserve.engine.memory_estimate import MAX_STEP_DRAFT_TOKENS
from specserve.engine.report import Outcome, Reports
from specserve.sources.controls import wants_report


class DraftScheduler(Scheduler):
    """Schedules only real draft tokens for verification, and no more than a step has room for.

    vLLM adds ``num_spec_tokens`` placeholders as draft to a new request with one token to compute,
    such as a prompt whose other tokens are cached. This gives all requests the length that its CUDA
    graphs expect. specserve's drafts have any length, so placeholders only cost time. Their rows
    also ignore ``logit_bias`` and ``min_p``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM adds no placeholders when it has a table of draft lengths by batch size.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._reports = Reports.of(self.vllm_config)

    def schedule(self, *args: Any, **options: Any) -> Any:
        """vLLM's method. Drafts may not displace other requests from the step."""
        self._cut_drafts()
        return super().schedule(*args, **options)

    def _cut_drafts(self) -> None:
        """Shortens the drafts if the step's tokens or its memory would not suffice for all.

        vLLM serves running requests in order of arrival. So the last ones would get no token, and
        waiting prompts would not be read. All drafts are cut to the same length. While prompts are
        read, or can be, they get at least half of the tokens that are left for drafts.
        """
        self._cut_drafts_for_logprobs()
        left = self.max_num_scheduled_tokens - len(self.running)
        if len(self.running) * self.num_spec_tokens <= min(left // 2, MAX_STEP_DRAFT_TOKENS):
            return
        num_running, num_waiting = self.get_request_counts()
        can_start = num_waiting and num_running < self.max_num_running_reqs
        if can_start or any(each.is_prefill_chunk for each in self.running):
            left //= 2
        room = max(0, min(left, MAX_STEP_DRAFT_TOKENS))
        drafts = [each.spec_token_ids for each in self.running]
        longest = max(map(len, drafts), default=0)
        while sum(min(len(draft), longest) for draft in drafts) > room:
            longest -= 1
        for draft in drafts:
            del draft[longest:]

    def _cut_drafts_for_logprobs(self) -> None:
        """Shortens the drafts if the step has a request with log-probabilities.

        vLLM then holds as many rows of logits for each request as the longest draft needs, also for
        prompts that start in this step.
        """
        most_requests = min(sum(self.get_request_counts()), self.max_num_running_reqs)
        if not self.running or most_requests * self.num_spec_tokens <= MAX_STEP_DRAFT_TOKENS:
            return
        if any(map(_has_logprobs, (*self.running, *self.waiting, *self.kv_holding_waiting))):
            for draft in [each.spec_token_ids for each in self.running]:
                del draft[MAX_STEP_DRAFT_TOKENS // most_requests :]

    def add_request(self, request: Any) -> None:
        """vLLM's method. Starts the counts of a request whose answer reports them."""
        super().add_request(request)
        extra_args = request.sampling_params.extra_args
        if request.spec_decode_metrics is None and wants_report(extra_args):
            request.spec_decode_metrics = self._reports.begin()
        if request.spec_decode_metrics is not None:
            self._reports.make_room(request.spec_decode_metrics)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's method. Also adds up the draft outcomes that the output carries."""
        outcomes = getattr(model_runner_output, "specserve_outcomes", {})
        may_end = self._count(outcomes)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if may_end:
            for output in (each for client in outputs.values() for each in client.outputs):
                if output.request_id in may_end and output.spec_decode_metrics is None:
                    # A copy: another thread encodes it while the next step counts.
                    output.spec_decode_metrics = copy.deepcopy(may_end[output.request_id])
        return outputs

    def _count(self, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
        """Adds outcomes to the counts; returns the counts of requests that may end now, by id.

        vLLM sends counts when the engine core ends a request. The replica ends a request with stop
        strings, after any token.
        """
        may_end = {}
        for request_id, outcome in outcomes.items():
            request = self.requests.get(request_id)
            if request is not None and request.spec_decode_metrics is not None:
                self._reports.add(request.spec_decode_metrics, outcome)
                if request.sampling_params.stop:
                    may_end[request_id] = request.spec_decode_metrics
        return may_end


def _has_logprobs(request: Any) -> bool:
    return request.sampling_params.num_logprobs is not None
