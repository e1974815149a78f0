"""Where the engine asks for drafts: the bridge between vLLM's model runner and the sources.

vLLM builds a :class:`ProposerHook` in every rank (``method="custom_class"``). The worker then gives
it the model runner (:mod:`specserve.engine.worker`), through which it learns what vLLM does not
pass: request ids, per-request controls, what was scheduled, and the hidden states.
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
from specserve.engine.grammars import Grammars
from specserve.engine.report import Outcome, reports_all
from specserve.engine.request_slots import RequestSlots
from specserve.engine.sampling import is_kept_without_drafts_only, may_step_plainly
from specserve.engine.source_context import source_context
from specserve.engine.state_copies import copy_states
from specserve.policy.chain import NO_LIMIT, Chain, build_chain
from specserve.sources.controls import parse_controls, wants_drafts, with_tenant

logger = logging.getLogger(__name__)

_TEXT = "a text"
"""Stands for the id of a request; vLLM's end with random digits."""
_TEXT_PIECE = 2048
"""Tokens of a text that are shown at once, fewer than a source may leave for the next step."""


class ProposerHook:
    """Asks the sources for drafts after each step of one model runner. Only rank 0's is asked."""

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
        self._chain: Chain  # of the rank that drafts, by `attach`
        self._slots = RequestSlots(2 * vllm_config.scheduler_config.max_num_seqs)
        self._reports_all = reports_all(vllm_config)
        self._reporting: set[str] = set()  # requests whose answers tell what speculation did
        self._outcomes: dict[str, Outcome] = {}  # of these in the last step
        self._grammars: Grammars | None = None  # where a source drafts from them, by `attach`
        self._vllm_config = vllm_config
        self._exits: list[Callable[[], None]] = []
        self.is_warm = threading.Event()
        self._runner: Any = None
        self._last_step_end = 0.0
        # Of the last step; other requests' are made anew.
        self._request_ids: list[str] = []
        self._texts: DraftBatch  # their rows in the engine's buffers
        self._plain_schedule: dict[str, int] = {}  # tokens of each in a step without drafts
        self._plain_step: Step  # what comes of such a step
        self._may_idle = False
        self._num_idle_steps_left = self._num_idle_steps = 0

    def load_model(self, target_model: object) -> None:
        """Nothing to load: the sources are made ready where they draft, by :meth:`attach`."""

    def propose(self, *args: object, **kwargs: object) -> list[list[int]]:
        """vLLM's entry point for custom proposers; it passes too little, so it is not used."""
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
        # vLLM stops all drafting once one request of the batch comes within a draft's length of the
        # context limit. We keep each request's draft within its own limit instead.
        runner.effective_drafter_max_model_len = self._max_model_len + self._max_draft_len

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
                for a request whose prompt is not finished.
            sampling_metadata: unused, as the rest.
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

    def _reported(self, outcomes: Int32Array) -> dict[str, Outcome]:
        return {
            each: (self._chain.labels[label], num_drafted, num_accepted)
            for each, label, num_drafted, num_accepted in zip(
                self._request_ids, *outcomes.tolist(), strict=True
            )
            if label >= 0 and each in self._reporting
        }

    def take_outcomes(self) -> dict[str, Outcome]:
        """What became of the last drafts of those requests whose answers tell it; told once."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def is_idle(self, scheduler_output: Any) -> bool:
        """Whether nothing would come of :meth:`propose_draft_token_ids` after the coming step.

        Such a step decodes the same requests as the last one and none has a draft. It is to be
        taken as without speculation, and then to be told of by :meth:`pass_over`.
        """
        is_left = self._num_idle_steps_left > 0
        return is_left and scheduler_output.num_scheduled_tokens == self._plain_schedule

    def pass_over(self, sampled_token_ids: list[list[int]]) -> None:
        """An idle step has run, with one new token of each request."""
        self._num_idle_steps_left -= 1
        self._num_idle_steps += 1
        step = self._plain_step
        if self._recent.with_tokens:
            step = step._replace(new=sampled_token_ids)
        self._recent.note(step)
        self._last_step_end = time.perf_counter()

    def forget(self, request_ids: Collection[str]) -> None:
        """Drops all state of finished or aborted requests."""
        if not request_ids:
            return
        self._recent.forget(request_ids)
        self._reporting.difference_update(request_ids)
        slots = self._slots.find(request_ids)
        if len(slots):
            if self._chain.has_unseen_texts:
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
    ) -> None:
        """Shows a text that no one request wrote to the sources that learn.

        Args:
            tokens: of the whole text.
            num_prompt_tokens: how many of them, from the first one, are prompt.
            extra_args: of the call that it answers: its controls and, with API keys, its tenant.
            adapter: the LoRA adapter that wrote it; empty: none did.
        """
        controls = replace(self._controls_of(extra_args), adapter=adapter)
        if not controls.learn:
            return
        token_ids = np.array([tokens], np.int32)
        num_prompt = np.array([num_prompt_tokens], np.int32)
        slots = np.array([self._free_slot(_TEXT, self._request_ids)], np.int64)
        try:
            self._chain.open(int(slots[0]), controls)
            for end in range(_TEXT_PIECE, len(tokens) + _TEXT_PIECE, _TEXT_PIECE):
                num_tokens = np.array([min(end, len(tokens))], np.int32)
                self._chain.finish(DraftBatch(slots, token_ids, num_tokens, num_prompt))
            self._chain.close(slots)
        finally:
            self._slots.free([_TEXT])

    def close(self) -> None:
        """Ends what the sources have started; they are not asked afterwards."""
        while self._exits:
            self._exits.pop(0)()

    def snapshot(self) -> bytes:
        """The metrics so far: a :class:`SpeculationSnapshot` as JSON."""
        return msgspec.json.encode(self.metrics.snapshot())

    def recent_requests(self, tenant: str) -> bytes:
        """A tenant's last requests: a list of :class:`RecentRequest` as JSON."""
        return msgspec.json.encode(self._recent.requests(tenant))

    def _take_slots(self, request_ids: Sequence[str]) -> None:
        """Other requests than in the last step: those that are new are opened."""
        for request_id in self._slots.missing(request_ids):
            self._open(request_id, request_ids)
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
        # Of other types and layouts the kernels would be compiled anew, within a step.
        assert all(each.dtype == np.int32 and each.flags.carray for each in self._texts[1:4])

    def _open(self, request_id: str, present: Sequence[str]) -> None:
        """A request's first step, or its first one since its slot was given away."""
        params = self._runner.requests[request_id].sampling_params
        most, least = NO_LIMIT, 0
        if params is not None:
            most, least = params.max_tokens or NO_LIMIT, params.min_tokens
        controls = self._read_controls(request_id)
        self._chain.open(self._free_slot(request_id, present), controls, most, least)
        self._recent.began(request_id, controls)
        if controls.report or self._reports_all:
            self._reporting.add(request_id)

    def _free_slot(self, request_id: str, present: Sequence[str]) -> int:
        if (lost := self._slots.victim(present)) is not None:
            self._chain.close(self._slots.find([lost]))
            self._slots.free([lost])
        return self._slots.add(request_id)

    def _observe_step(self, scheduler_output: Any, num_draft_tokens: int) -> None:
        """Tells the cost of a step that had the requests of the one before it, if it read nothing.

        Only then the time between the two ends is the step's own: the engine was never idle, and
        no prompt was read.
        """
        size = len(self._request_ids)
        if scheduler_output.total_num_scheduled_tokens == size + num_draft_tokens:
            seconds = time.perf_counter() - self._last_step_end
            self._chain.cost.observe(size, num_draft_tokens, seconds)

    def _last_texts(self, request_ids: Collection[str]) -> DraftBatch:
        """The texts of those of these requests that have a slot and a row in the model runner."""
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
        # Of before the step: the scheduler tells what it has computed with the next one.
        starts = self._runner.input_batch.num_computed_tokens_cpu[: len(request_ids)]
        return HiddenStates(
            partial(copy_states, hidden, num_tokens), num_tokens, starts.astype(np.int32)
        )

    def _read_controls(self, request_id: str) -> RequestControls:
        request = self._runner.requests[request_id]
        params, lora = request.sampling_params, request.lora_request
        extra_args = params.extra_args if params is not None else None
        controls = self._controls_of(extra_args or {})
        if params is not None and is_kept_without_drafts_only(params):
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
        except RequestError as error:  # the HTTP side has checked; other callers may not have
            logger.warning("%s; drafting as usual", error)
            controls = RequestControls()
        return with_tenant(controls, extra_args) if self._config.http.api_keys else controls


def _has_unknown_tokens(request: Any) -> bool:
    """Whether positions of the prompt were given as embeddings.

    For these vLLM writes no token ids into a request's row, or some that stand for all of them:
    what is there may be another request's text.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return True
    return any(each.modality == "prompt_embeds" for each in request.mm_features)
