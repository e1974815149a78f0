"""The proposer hook: connects vLLM's model runner with the draft sources.

vLLM builds a :class:`ProposerHook` in every rank (``method="custom_class"``). In rank 0 the worker
(:mod:`specserve.engine.worker`) then attaches the model runner to it. The hook reads there what
vLLM does not pass to a proposer: request ids, controls, scheduled tokens and hidden states.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from vllm.config import VllmConfig

from specserve.core.config import AppConfig
from specserve.core.errors import RequestError
from specserve.core.metrics import SpeculationMetrics
from specserve.core.recent import MAX_OUTCOMES, RecentSteps, Step
from specserve.core.source_config import DrafterConfig
from specserve.core.types import (
    DraftBatch,
    HiddenStates,
    Int32Array,
    RequestControls,
)
from specserve.engine.containment import contained
from specserve.engine.grammars import Grammars
from specserve.engine.report import Outcome, reports_all
from specserve.engine.request_slots import RequestSlots
from specserve.engine.sampling import is_kept_without_drafts_only, may_step_plainly
from specserve.engine.source_context import source_context
from specserve.engine.state_copies import copy_states
from specserve.policy.chain import NO_LIMIT, Chain, build_chain
from specserve.sources.controls import parse_controls, wants_drafts, with_tenant

logger = logging.getLogger(__name__)

_LEARNED_TEXT_ID = "a text"
"""Request id of a text that is only learned. vLLM's ids end with random digits and differ."""
_TEXT_PIECE = 2048
"""Tokens of a learned text shown in one call. The trie learns at most 4096 tokens in a call, and
would skip the others."""


class ProposerHook:
    """Asks the sources for drafts after each step of rank 0's model runner."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = AppConfig.model_validate(vllm_config.additional_config["specserve"], strict=False)
        self.model_name = config.model.name
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._max_draft_len = config.num_speculative_tokens
        self._config = config
        self._kinds = tuple(source.kind for source in config.speculation)
        self._feeds_drafters = any(isinstance(each, DrafterConfig) for each in config.speculation)
        self.metrics = SpeculationMetrics(self._kinds)
        self._recent = RecentSteps(
            MAX_OUTCOMES if config.http.speculation_page else 0, with_tokens=config.http.show_text
        )
        self._chain: Chain  # set by `attach`, in rank 0 only
        self._slots = RequestSlots(2 * vllm_config.scheduler_config.max_num_seqs)
        self._reports_all = reports_all(vllm_config)
        self._reporting: set[str] = set()  # requests whose answers report draft counts
        self._outcomes: dict[str, Outcome] = {}  # the last step's outcomes of these requests
        self._grammars: Grammars | None = None  # set by `attach` if a source drafts from grammars
        self._vllm_config = vllm_config
        self._exits: list[Callable[[], None]] = []
        self.is_warm = threading.Event()
        self._runner: Any = None
        self._last_step_end = 0.0
        # Valid while the batch holds the same requests in the same order.
        self._request_ids: list[str] = []
        self._texts: DraftBatch  # views of these requests' rows in the model runner's buffers
        self._plain_schedule: dict[str, int] = {}  # scheduled tokens in a step without drafts
        self._plain_step: Step  # the record of a step without drafts
        self._may_idle = False
        self._num_idle_steps_left = self._num_idle_steps = 0

    def load_model(self, target_model: object) -> None:
        """Does nothing; :meth:`attach` prepares the sources."""

    def propose(self, *args: object, **kwargs: object) -> list[list[int]]:
        """Always fails. vLLM calls it for proposers, without request ids and hidden states."""
        raise AssertionError("the worker must attach its model runner: check worker_cls")

    def attach(self, runner: Any) -> None:
        """Takes over the drafting of ``runner``, a vLLM V1 model runner of rank 0."""
        context = source_context(
            self._config,
            self._vllm_config,
            self.metrics,
            len(self._slots),
            self._exits,
            self.is_warm,
        )
        self._chain = build_chain(
            self._config.speculation, self.metrics, context, self._max_model_len
        )
        if "grammar" in self._kinds:
            self._grammars = Grammars(self._vllm_config)
            self._exits.append(self._grammars.close)
        self._runner = runner
        self._may_idle = may_step_plainly(runner)
        runner.propose_draft_token_ids = self.propose_draft_token_ids
        # vLLM stops drafting for the whole batch when one request is near the context limit. The
        # chain limits each request's draft by itself, so this raises vLLM's limit out of reach.
        runner.effective_drafter_max_model_len = self._max_model_len + self._max_draft_len

    @contained(lambda _, sampled_token_ids, *rest: [[] for _ in sampled_token_ids])
    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: object,
        hidden_states: Any,
        *rest: object,
    ) -> list[list[int]]:
        """Replaces the model runner's method of this name.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput`` of the step that has just run.
            sampled_token_ids: the step's new tokens, a list for each request of the batch; empty
                for a request whose prefill is not finished.
            sampling_metadata: unused, as is ``rest``.
            hidden_states: float ``[>= num_scheduled_tokens, hidden_size]``, after the final norm;
                CUDA graphs pad it.

        Returns:
            One draft for each request of the batch; any may be empty.
        """
        chain, scheduled = self._chain, scheduler_output.scheduled_spec_decode_tokens
        is_same = self._runner.input_batch.req_ids == self._request_ids
        if not is_same:
            self._take_slots(self._runner.input_batch.req_ids)
        request_ids, slots, batch = self._request_ids, self._texts.slots, self._texts
        if self._feeds_drafters:
            states = self._hidden_states(scheduler_output, hidden_states)
            batch = batch._replace(hidden_states=states)
        verified = [len(scheduled.get(each, ())) for each in request_ids]
        num_new = np.array([len(tokens) for tokens in sampled_token_ids], np.int32)
        outcomes = chain.observe(batch, num_new, np.array(verified, np.int32))
        if self._reporting:
            self._outcomes = self._reported(outcomes)
        of_drafts, num_drafted, num_accepted = outcomes
        step = Step(request_ids, chain.labels, of_drafts, num_drafted, num_accepted, num_new)
        if self._recent.with_tokens:
            step = step._replace(new=sampled_token_ids, drafted=chain.sent[slots])
        self._recent.note(step)
        if is_same:
            self._observe_step(scheduler_output, sum(verified))
        num_steps, self._num_idle_steps = 1 + self._num_idle_steps, 0
        drafts = chain.step(batch, num_steps)
        if self._may_idle:
            self._num_idle_steps_left = chain.num_idle_steps(slots)
        self._last_step_end = time.perf_counter()
        return drafts

    @contained(lambda requests, _: [[] for _ in requests])
    def draft_first(self, requests: Sequence[Any], num_requests: int) -> list[list[int]]:
        """Drafts for new requests, which the step that computes the end of their prompts verifies.

        Args:
            requests: vLLM's ``NewRequestData``, with the tokens of their prompts.
            num_requests: number of requests in that step.

        Returns:
            One draft for each request; any may be empty.
        """
        by_id = {each.req_id: each for each in requests}
        present = [*self._runner.input_batch.req_ids, *by_id]
        for request_id in self._slots.missing([*by_id]):
            self._open(request_id, present, by_id[request_id])
        num_tokens = np.array([len(each.prompt_token_ids) for each in requests], np.int32)
        token_ids = np.zeros((len(requests), num_tokens.max()), np.int32)
        for row, each in zip(token_ids, requests, strict=True):
            row[: len(each.prompt_token_ids)] = each.prompt_token_ids
        batch = DraftBatch(self._slots.of([*by_id]), token_ids, num_tokens, num_tokens.copy())
        return self._chain.draft_first(batch, num_requests)

    def _reported(self, outcomes: Int32Array) -> dict[str, Outcome]:
        return {
            each: (self._chain.labels[label], num_drafted, num_accepted)
            for each, label, num_drafted, num_accepted in zip(
                self._request_ids, *outcomes.tolist(), strict=True
            )
            if label >= 0 and each in self._reporting
        }

    def take_outcomes(self) -> dict[str, Outcome]:
        """Returns the last step's outcomes of requests that report them, and clears them."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    @contained(lambda _: False)
    def is_idle(self, scheduler_output: Any) -> bool:
        """Whether no source has work after the coming step.

        An idle step decodes the same requests as the last step, and none has a draft. The worker
        runs it without speculation and reports it with :meth:`note_idle_step`.
        """
        is_left = self._num_idle_steps_left > 0
        return is_left and scheduler_output.num_scheduled_tokens == self._plain_schedule

    @contained(lambda _: None)
    def note_idle_step(self, sampled_token_ids: list[list[int]]) -> None:
        """Records an idle step that has run, with one new token for each request."""
        self._num_idle_steps_left -= 1
        self._num_idle_steps += 1
        step = self._plain_step
        if self._recent.with_tokens:
            step = step._replace(new=sampled_token_ids)
        self._recent.note(step)
        self._last_step_end = time.perf_counter()

    @contained(lambda _: None)
    def forget(self, request_ids: Collection[str]) -> None:
        """Drops all state of finished or aborted requests, after the sources have learned them."""
        if not request_ids:
            return
        self._recent.forget(request_ids)
        self._reporting.difference_update(request_ids)
        slots = self._slots.find(request_ids)
        if len(slots):
            self._chain.finish(self._last_texts(request_ids))
            self._chain.close(slots)
            self._slots.free(request_ids)
            self._request_ids = []

    def learn(
        self,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        extra_args: Mapping[str, object],
        adapter: str = "",
        began: float = 0.0,
    ) -> None:
        """Teaches the sources a text that several requests produced, such as a beam search's.

        Args:
            tokens: the whole text.
            num_prompt_tokens: how many of the first tokens are prompt.
            extra_args: controls of the call that it answers and, with API keys, the tenant.
            adapter: the LoRA adapter that wrote it; empty: none.
            began: when the text began, in seconds since 1970; 0.0: it begins now.
        """
        controls = replace(self._controls_of(extra_args), adapter=adapter, began=began)
        if self.metrics.has_failed or not controls.learn:
            return
        token_ids = np.array([tokens], np.int32)
        num_prompt = np.array([num_prompt_tokens], np.int32)
        slots = np.array([self._free_slot(_LEARNED_TEXT_ID, self._request_ids)], np.int64)
        try:
            self._chain.open(int(slots[0]), controls)
            for end in range(_TEXT_PIECE, len(tokens) + _TEXT_PIECE, _TEXT_PIECE):
                num_tokens = np.array([min(end, len(tokens))], np.int32)
                self._chain.finish(DraftBatch(slots, token_ids, num_tokens, num_prompt))
            self._chain.close(slots)
        finally:
            self._slots.free([_LEARNED_TEXT_ID])

    def close(self) -> None:
        """Stops threads and actors that the sources started. No source is asked afterwards."""
        while self._exits:
            self._exits.pop(0)()

    def snapshot(self) -> bytes:
        """Current metrics: a :class:`SpeculationSnapshot` as JSON."""
        return msgspec.json.encode(self.metrics.snapshot())

    def recent_requests(self, tenant: str) -> bytes:
        """A tenant's last requests: a list of :class:`RecentRequest` as JSON."""
        return msgspec.json.encode(self._recent.requests(tenant))

    def _take_slots(self, request_ids: Sequence[str]) -> None:
        """Adopts the step's requests and opens those that have no slot."""
        for request_id in self._slots.missing(request_ids):
            self._open(request_id, request_ids, self._runner.requests[request_id])
        self._request_ids, size = list(request_ids), len(request_ids)
        self._plain_schedule = dict.fromkeys(request_ids, 1)
        none = np.zeros(size, np.int32)
        self._plain_step = Step(self._request_ids, (), none - 1, none, none, none + 1)
        buffers = self._runner.input_batch
        self._texts = DraftBatch(
            self._slots.of(request_ids),
            buffers.token_ids_cpu[:size],
            buffers.num_tokens_no_spec[:size],
            buffers.num_prompt_tokens[:size],
        )
        # Other types or layouts would make numba compile the kernels again during a step.
        assert all(each.dtype == np.int32 and each.flags.carray for each in self._texts[1:4])

    def _open(self, request_id: str, present: Sequence[str], request: Any) -> None:
        """Opens a request before or after its first step, or when it comes back without a slot.

        Args:
            request_id: vLLM's request id.
            present: ids of the requests that must keep their slots.
            request: the new request's data, or the model runner's state of it.
        """
        params = request.sampling_params
        most, least = params.max_tokens or NO_LIMIT, params.min_tokens
        stops = [*(params.stop_token_ids or ())]
        if params.structured_outputs:
            # A grammar ends at a stop token, also with `ignore_eos`. vLLM's `guidance` fails on a
            # step with more tokens after it.
            others = params.all_stop_token_ids.difference(stops)  # the end token, if not given
            stops = [*others, *stops]
        elif params.eos_token_id is not None:  # None with `ignore_eos`
            stops.insert(0, params.eos_token_id)
        controls = self._read_controls(request_id, request)
        self._chain.open(self._free_slot(request_id, present), controls, most, least, stops)
        self._recent.began(request_id, controls)
        if controls.report or self._reports_all:
            self._reporting.add(request_id)

    def _free_slot(self, request_id: str, present: Sequence[str]) -> int:
        if (lost := self._slots.victim(present)) is not None:
            self._chain.close(self._slots.find([lost]))
            self._slots.free([lost])
        return self._slots.add(request_id)

    def _observe_step(self, scheduler_output: Any, num_draft_tokens: int) -> None:
        """Adds the duration of a decode-only step to the cost model.

        The caller makes sure that the step before had the same requests, so the engine was not
        idle. The time since that step's end is this step's duration. Prefill steps are skipped.
        """
        size = len(self._request_ids)
        if scheduler_output.total_num_scheduled_tokens == size + num_draft_tokens:
            seconds = time.perf_counter() - self._last_step_end
            self._chain.cost.observe(size, num_draft_tokens, seconds)

    def _last_texts(self, request_ids: Collection[str]) -> DraftBatch:
        """Texts of the given requests that have a slot and a row in the model runner."""
        buffers, by_id = self._runner.input_batch, self._slots.by_id
        held = [
            (row, by_id[each])
            for row, each in enumerate(buffers.req_ids)
            if each in request_ids and each in by_id
        ]
        rows = [row for row, _ in held]
        num_tokens = buffers.num_tokens_no_spec[rows]
        return DraftBatch(
            np.array([slot for _, slot in held], np.int64),
            buffers.token_ids_cpu[rows, : num_tokens.max(initial=0)],
            num_tokens,
            buffers.num_prompt_tokens[rows],
        )

    def _hidden_states(self, scheduler_output: Any, hidden: Any) -> HiddenStates:
        request_ids = self._runner.input_batch.req_ids
        scheduled = scheduler_output.num_scheduled_tokens
        num_tokens = np.array([scheduled[each] for each in request_ids], np.int32)
        # Values before this step: the scheduler updates them with its next output.
        starts = self._runner.input_batch.num_computed_tokens_cpu[: len(request_ids)]
        return HiddenStates(
            partial(copy_states, hidden, num_tokens), num_tokens, starts.astype(np.int32)
        )

    def _read_controls(self, request_id: str, request: Any) -> RequestControls:
        params, lora = request.sampling_params, request.lora_request
        controls = self._controls_of(params.extra_args or {})
        if is_kept_without_drafts_only(params):
            controls = replace(controls, speculation="off")
        if _has_unknown_tokens(request):
            controls = replace(controls, speculation="off", learn=False)
        if lora is not None:
            controls = replace(controls, adapter=lora.lora_name)
        if self._grammars is not None and wants_drafts(controls, "grammar"):
            controls = replace(controls, grammar=self._grammars.open(request_id, request))
        return controls

    def _controls_of(self, extra_args: Mapping[str, object]) -> RequestControls:
        try:
            controls = parse_controls(extra_args, self._kinds)
        except RequestError as error:  # only from callers other than the checked HTTP routes
            logger.warning("%s; drafting as usual", error)
            controls = RequestControls()
        return with_tenant(controls, extra_args) if self._config.http.api_keys else controls


def _has_unknown_tokens(request: Any) -> bool:
    """Whether a part of the prompt was given as embeddings.

    For these positions vLLM writes no token ids or placeholder ids into the request's row. The row
    may still hold the text of another request.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return True
    return any(each.modality == "prompt_embeds" for each in request.mm_features)
