"""vLLM's scheduler for drafts of any length, with acceptance counts by source."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from vllm.v1.core.sched.scheduler import Scheduler

from specserve.engine.memory_estimate import MAX_STEP_DRAFT_TOKENS
from specserve.engine.report import Outcome, Reports
from specserve.engine.sampling import may_step_plainly
from specserve.sources.controls import wants_report

FirstDrafts = Callable[[Sequence[Any], int], list[list[int]]]


class DraftScheduler(Scheduler):
    """Schedules only real draft tokens for verification, and no more than a step has room for.

    A step that ends a new request's prompt also verifies its first draft.

    vLLM adds ``num_spec_tokens`` placeholders as draft to a new request with one token to compute,
    such as a prompt whose other tokens are cached. This gives all requests the length that its CUDA
    graphs expect. specserve's drafts have any length, so placeholders only cost time. Their rows
    also ignore ``logit_bias`` and ``min_p``.
    """

    _draft_first: ClassVar[FirstDrafts | None] = None

    @classmethod
    def draft_first_with(cls, draft_first: FirstDrafts | None) -> None:
        """Sets the function that drafts for new requests, in this process.

        Args:
            draft_first: returns a draft for each ``NewRequestData``, in a step of so many requests.
                None: new requests get no draft.
        """
        cls._draft_first = draft_first

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM adds no placeholders when it has a table of draft lengths by batch size.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._reports = Reports.of(self.vllm_config)
        # Recurrent layers: vLLM takes a request with drafts for one whose prompt has been read.
        # New blocks that the worker must zero: vLLM has listed the step's already.
        self._may_draft_first = may_step_plainly(self.vllm_config) and not (
            self.connector or self.needs_kv_cache_zeroing
        )

    def schedule(self, *args: Any, **options: Any) -> Any:
        """vLLM's method. Drafts may not displace other requests from the step."""
        self._cut_drafts()
        output = super().schedule(*args, **options)
        draft_first = type(self)._draft_first
        if draft_first and self._may_draft_first and output.scheduled_new_reqs:
            self._add_first_drafts(output, draft_first)
        return output

    def _add_first_drafts(self, output: Any, draft_first: FirstDrafts) -> None:
        """Adds drafts for new requests whose prompt ends in the step, as far as there is room."""
        if any(map(_has_logprobs, self.running)):
            return
        added = [(each, self.requests[each.req_id]) for each in output.scheduled_new_reqs]
        added = [(each, request) for each, request in added if _may_draft_first(request)]
        most = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        left = min(
            most - output.total_num_scheduled_tokens,
            MAX_STEP_DRAFT_TOKENS - sum(map(len, output.scheduled_spec_decode_tokens.values())),
        )
        if not added or left <= 0:
            return
        drafts = draft_first([each for each, _ in added], len(output.num_scheduled_tokens))
        for (new, request), draft in zip(added, drafts, strict=True):
            size = min(len(draft), left)
            if size <= 0 or self.kv_cache_manager.allocate_slots(request, size) is None:
                continue
            left -= size
            output.scheduled_spec_decode_tokens[new.req_id] = draft[:size]
            new.block_ids = self.kv_cache_manager.get_block_ids(new.req_id)
            output.num_scheduled_tokens[new.req_id] += size
            output.total_num_scheduled_tokens += size
            request.num_computed_tokens += size
            request.num_in_flight_tokens += size

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


def _may_draft_first(request: Any) -> bool:
    """Whether a request's prompt ends in its first step and is nothing but tokens.

    Requests with a grammar are left out, because it would have to check the draft first.
    """
    is_text = request.prompt_token_ids is not None and request.prompt_embeds is None
    has_more = request.has_encoder_inputs or request.use_structured_output
    reports_prompt = request.sampling_params.prompt_logprobs is not None
    ends = not (request.is_prefill_chunk or request.num_output_tokens)
    return is_text and ends and not (has_more or reports_prompt)
