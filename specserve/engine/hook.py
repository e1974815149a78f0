"""Where the engine asks for drafts: the bridge between vLLM's model runner and the sources.

vLLM builds a :class:`ProposerHook` in every rank (``method="custom_class"``). The worker then gives
it the model runner (:mod:`specserve.engine.worker`), through which it learns what vLLM does not
pass: request ids, per-request controls, what was scheduled, and the hidden states.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import ray
import torch
from msgspec.structs import replace
from vllm.config import VllmConfig

from specserve.core.config import AppConfig
from specserve.core.errors import RequestError
from specserve.core.metrics import SpeculationMetrics
from specserve.core.recent import MAX_OUTCOMES, RecentSteps
from specserve.core.source_config import DrafterConfig, TrieConfig
from specserve.core.types import Draft, DraftBatch, HiddenStates, Outcome, RequestControls
from specserve.drafters.vocabulary import fingerprint
from specserve.engine.checkpoint import find_checkpoint, model_identity
from specserve.engine.cluster_memory import ClusterMemory
from specserve.engine.drafters import drafter_finder
from specserve.engine.sampling import is_kept_without_drafts_only, may_step_plainly
from specserve.proposers.base import SourceContext
from specserve.proposers.chain import NO_DRAFT, ProposerChain, build_chain
from specserve.proposers.controls import parse_controls, with_tenant
from specserve.trie.memory import SharedMemory, TrieMemory

logger = logging.getLogger(__name__)


class ProposerHook:
    """Asks the sources for drafts after each step of one model runner. Only rank 0's is asked."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = AppConfig.model_validate(vllm_config.additional_config["specserve"], strict=False)
        self.model_name = config.model.name
        self._model_config = vllm_config.model_config
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._max_draft_len = config.num_speculative_tokens
        self._config = config
        self._kinds = tuple(source.kind for source in config.speculation)
        self._feeds_drafters = any(isinstance(each, DrafterConfig) for each in config.speculation)
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        lora = vllm_config.lora_config
        self._num_adapters: int = 0 if lora is None else lora.max_cpu_loras or lora.max_loras
        modules = config.engine.vllm.get("lora_modules") or ()
        self._adapters: tuple[str, ...] = tuple(module["name"] for module in modules)
        self._label_key = bytes.fromhex(
            vllm_config.additional_config.get("specserve_label_key", "")
        )
        self.metrics = SpeculationMetrics(self._kinds)
        self._recent = RecentSteps(
            MAX_OUTCOMES if config.http.speculation_page else 0, with_tokens=config.http.show_text
        )
        self._chain: ProposerChain  # of the rank that drafts, by `attach`
        self._exits: list[Callable[[], None]] = []
        self.is_warm = threading.Event()
        self._runner: Any = None
        self._drafts: dict[str, Draft] = {}
        self._controls: dict[str, RequestControls] = {}
        self._last_step_end = 0.0
        self._plain_step: dict[str, int] = {}  # of the last one's requests: tokens to schedule
        self._may_idle = False
        self._num_idle_steps_left = self._num_idle_steps = 0

    def load_model(self, target_model: object) -> None:
        """Nothing to load: the sources are made ready where they draft, by :meth:`attach`."""

    def propose(self, *args: object, **kwargs: object) -> list[list[int]]:
        """vLLM's entry point for custom proposers; it passes too little, so it is not used."""
        raise AssertionError("the worker must attach its model runner: check worker_cls")

    def attach(self, runner: Any) -> None:
        """Takes over the drafting of ``runner``, a vLLM V1 model runner of rank 0."""
        self._chain = build_chain(self._config.speculation, self.metrics, self._source_context())
        self._runner = runner
        self._may_idle = may_step_plainly(runner)
        runner.propose_draft_token_ids = self.propose_draft_token_ids
        # vLLM stops all drafting once one request of the batch comes within a draft's length of the
        # context limit. We keep each request's draft within its own limit instead.
        runner.effective_drafter_max_model_len = self._max_model_len + self._max_draft_len

    def _source_context(self) -> SourceContext:
        # Only some sources ask for these, and they take the checkpoint's files.
        has_drafters = self._feeds_drafters
        has_identity = has_drafters or "trie" in self._kinds
        identity = model_identity(self._config.model) if has_identity else ""
        vocab_size = self._vocab_size
        replica = _own_name() if ray.is_initialized() else ""

        def share(config: TrieConfig, memory: TrieMemory) -> SharedMemory:
            shared = ClusterMemory(config, memory, identity, vocab_size)
            self._exits.insert(0, shared.close)  # before any that may wait for long
            return shared

        return SourceContext(
            vocab_size=vocab_size,
            model_identity=identity,
            tenants=tuple(sorted({key.tenant for key in self._config.http.api_keys})),
            num_adapters=self._num_adapters,
            adapters=self._adapters,
            label_key=self._label_key,
            metrics=self.metrics,
            share=share if ray.is_initialized() else None,  # an offline engine is on its own
            tokenizer=self._vocabulary() if has_drafters else "",
            hidden_size=self._model_config.get_hidden_size() if has_drafters else 0,
            replica=replica,
            find_drafter=partial(
                drafter_finder,
                self._config.model,
                replica,
                self._max_model_len,
                self._exits,
                self.is_warm,
            ),
            exits=self._exits,
        )

    def _vocabulary(self) -> str:
        model = self._config.model
        return fingerprint(find_checkpoint(model).tokenizer, model.revision)

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
            sampling_metadata: unused.
            hidden_states: float ``[>= num_scheduled_tokens, hidden_size]``, after the final norm;
                CUDA graphs pad it.
            rest: unused.

        Returns:
            One draft for each request of the batch; any may be empty.
        """
        input_batch = self._runner.input_batch
        request_ids: list[str] = input_batch.req_ids
        outcomes = self._outcomes(request_ids, sampled_token_ids, scheduler_output)
        self._observe_step(request_ids, scheduler_output)
        controls = [self._controls_of(request_id) for request_id in request_ids]
        self._recent.note(outcomes)
        num_steps, self._num_idle_steps = 1 + self._num_idle_steps, 0
        if due := self._chain.due(len(request_ids), num_steps):
            batch = self._draft_batch(
                request_ids, sampled_token_ids, scheduler_output, hidden_states
            )
            drafts = self._chain.step(batch, outcomes, controls, due)
        else:
            self._chain.observe(outcomes)
            drafts = [NO_DRAFT] * len(request_ids)
        # A request that had no turn in this step keeps its draft: the scheduler does so too.
        for request_id, draft in zip(request_ids, drafts, strict=True):
            if draft.tokens:
                self._drafts[request_id] = draft
            else:
                self._drafts.pop(request_id, None)
        if self._may_idle:
            self._num_idle_steps_left = self._chain.num_idle_steps(request_ids)
        self._last_step_end = time.monotonic()
        return [list(draft.tokens) for draft in drafts]

    def is_idle(self, scheduler_output: Any) -> bool:
        """Whether nothing would come of :meth:`propose_draft_token_ids` after this step.

        Such a step decodes the same requests as the last one and none has a draft. It is to be
        taken as without speculation, and then to be told of by :meth:`pass_over`.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput`` of the step that is about to run.
        """
        is_left = self._num_idle_steps_left > 0
        return is_left and scheduler_output.num_scheduled_tokens == self._plain_step

    def pass_over(self, request_ids: list[str], sampled_token_ids: list[list[int]]) -> None:
        """An idle step has run.

        Args:
            request_ids: n.
            sampled_token_ids: n, the step's new tokens.
        """
        self._num_idle_steps_left -= 1
        self._num_idle_steps += 1
        self._recent.note(
            [
                Outcome(request_id, None, 0, tuple(new_tokens))
                for request_id, new_tokens in zip(request_ids, sampled_token_ids, strict=True)
                if new_tokens
            ]
        )
        self._last_step_end = time.monotonic()

    def forget(self, request_ids: Collection[str]) -> None:
        """Drops all state of finished or aborted requests."""
        if not request_ids:
            return
        if self._chain.has_unseen_texts:
            self._chain.finish(self._last_texts(request_ids))
        for request_id in request_ids:
            self._controls.pop(request_id, None)
            self._drafts.pop(request_id, None)
        self._recent.forget(request_ids)
        self._chain.forget(list(request_ids))

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

    def _outcomes(
        self, request_ids: list[str], sampled: list[list[int]], scheduler_output: Any
    ) -> list[Outcome]:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        outcomes = []
        for request_id, new_tokens in zip(request_ids, sampled, strict=True):
            if not new_tokens:
                continue
            draft = self._drafts.pop(request_id, None)
            # The scheduler may have cut the draft, or dropped it with the request's turn.
            num_verified = len(scheduled.get(request_id, ()))
            verified = None if draft is None or num_verified == 0 else draft.cut(num_verified)
            num_accepted = len(new_tokens) - 1 if verified is not None else 0
            outcomes.append(Outcome(request_id, verified, num_accepted, tuple(new_tokens)))
        return outcomes

    def _observe_step(self, request_ids: list[str], scheduler_output: Any) -> None:
        """Tells the cost of a step, where it decoded the same requests as the one before it.

        Only then the time between the two ends is the step's own: the engine was never idle, and
        no prompt was read.
        """
        size = len(request_ids)
        drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        if (
            scheduler_output.total_num_scheduled_tokens == size + drafted
            and scheduler_output.num_scheduled_tokens.keys() == self._plain_step.keys()
        ):
            seconds = time.monotonic() - self._last_step_end
            context = float(self._runner.input_batch.num_tokens_no_spec[:size].mean())
            self._chain.observe_step(size, drafted, seconds, context)
        self._plain_step = dict.fromkeys(request_ids, 1)

    def _draft_batch(
        self, request_ids: list[str], sampled: list[list[int]], scheduler_output: Any, hidden: Any
    ) -> DraftBatch:
        input_batch = self._runner.input_batch
        size = len(request_ids)
        num_tokens = input_batch.num_tokens_no_spec[:size].astype(np.int32)
        num_prompt_tokens = input_batch.num_prompt_tokens[:size].astype(np.int32)
        room = [
            self._room(name, num_prompt, length) if tokens else 0
            for name, num_prompt, length, tokens in zip(
                request_ids, num_prompt_tokens.tolist(), num_tokens.tolist(), sampled, strict=True
            )
        ]
        return DraftBatch(
            request_ids=list(request_ids),
            token_ids=input_batch.token_ids_cpu[:size],
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_draft_tokens=np.array(room, np.int32),
            hidden_states=self._hidden_states(request_ids, scheduler_output, hidden),
        )

    def _room(self, request_id: str, num_prompt_tokens: int, num_tokens: int) -> int:
        """Longest draft that a request's text, of ``num_tokens`` so far, has room for."""
        params = self._runner.requests[request_id].sampling_params
        end, num_unstoppable = self._max_model_len, 0
        if params is not None:
            if params.max_tokens is not None:
                end = min(end, num_prompt_tokens + params.max_tokens)
            num_unstoppable = num_prompt_tokens + params.min_tokens - num_tokens
        # One token more is always sampled after the draft, and it has to fit too.
        room = min(end - num_tokens - 1, self._max_draft_len)
        if num_unstoppable > 0:
            # vLLM lets that token stop the text where the draft's first one may.
            room = min(room, num_unstoppable - 1)
        return max(room, 0)

    def _last_texts(self, request_ids: Collection[str]) -> DraftBatch:
        """The texts of those of these requests that the model runner still holds."""
        input_batch = self._runner.input_batch
        rows = {each: row for row, each in enumerate(input_batch.req_ids) if each in request_ids}
        chosen = list(rows.values())
        num_tokens = input_batch.num_tokens_no_spec[chosen].astype(np.int32)
        return DraftBatch(
            request_ids=list(rows),
            token_ids=input_batch.token_ids_cpu[chosen, : num_tokens.max(initial=0)],
            num_tokens=num_tokens,
            num_prompt_tokens=input_batch.num_prompt_tokens[chosen].astype(np.int32),
            max_draft_tokens=np.zeros(len(rows), np.int32),
            controls=tuple(self._controls_of(request_id) for request_id in rows),
        )

    def _hidden_states(
        self, request_ids: list[str], scheduler_output: Any, hidden: Any
    ) -> HiddenStates | None:
        if not self._feeds_drafters:
            return None
        num_scheduled = scheduler_output.num_scheduled_tokens
        return HiddenStates(
            partial(_to_host, hidden, scheduler_output.total_num_scheduled_tokens),
            tuple(num_scheduled[request_id] for request_id in request_ids),
            # Of before the step: the scheduler tells what it has computed with the next one.
            tuple(self._runner.input_batch.num_computed_tokens_cpu[: len(request_ids)].tolist()),
        )

    def _controls_of(self, request_id: str) -> RequestControls:
        controls = self._controls.get(request_id)
        if controls is None:
            controls = self._read_controls(request_id)
            self._controls[request_id] = controls
            self._recent.began(request_id, controls)
        return controls

    def _read_controls(self, request_id: str) -> RequestControls:
        request = self._runner.requests[request_id]
        params, lora = request.sampling_params, request.lora_request
        extra_args = params.extra_args if params is not None else None
        try:
            controls = parse_controls(extra_args, self._kinds)
        except RequestError as error:  # the HTTP side has checked; other callers may not have
            logger.warning("Request %s: %s; drafting as usual", request_id, error)
            controls = RequestControls()
        if params is not None and is_kept_without_drafts_only(params):
            controls = replace(controls, speculation="off")
        if _has_unknown_tokens(request):
            controls = replace(controls, speculation="off", learn=False)
        if lora is not None:
            controls = replace(controls, adapter=lora.lora_name)
        if self._config.http.api_keys:
            controls = with_tenant(controls, extra_args)
        return controls


def _own_name() -> str:
    """A name that no other process of the cluster has: an actor's, or an engine core's job."""
    context = ray.get_runtime_context()
    return str(context.get_actor_id() or context.get_job_id())


def _has_unknown_tokens(request: Any) -> bool:
    """Whether positions of the prompt were given as embeddings.

    For these vLLM writes no token ids into a request's row, or some that stand for all of them:
    what is there may be another request's text.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return True
    return any(each.modality == "prompt_embeds" for each in request.mm_features)


def _to_host(hidden: torch.Tensor, num_tokens: int) -> npt.NDArray[np.uint16]:
    """The first rows of ``hidden``, ``[num_tokens, hidden_size]``, as the bits of bfloat16."""
    bits = hidden[:num_tokens].bfloat16().contiguous().view(torch.uint16)
    return np.asarray(bits.cpu().numpy(), np.uint16)
