"""Our drafting code and vLLM's for one decoding step, called as by a model runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from vllm import SamplingParams
from vllm.v1.spec_decode.ngram_proposer import NgramProposer as VllmNgramProposer

from specserve.core import types
from specserve.core.config import AppConfig
from specserve.core.source_config import TrieConfig
from specserve.core.types import DraftBatch, Int32Array, RequestControls
from specserve.engine.hook import ProposerHook
from specserve.sources.base import SourceContext
from specserve.sources.trie import LEARN_TOKENS_PER_STEP, TrieSource
from specserve.trie.memory import TrieMemory
from tests.peers.replay import NAMESPACE, learn
from tests.peers.suffix_peer import VllmSuffix

DRAFT_LEN = 16
VOCAB_SIZE = 1 << 20
MAX_BYTES = 256 << 20
"""Size of the trie."""

Drafts = list[list[int]]


class Requests:
    """The part of vLLM's input batch that drafters read.

    Args:
        names: n ids.
        token_ids: int32 ``[n, width]``, the whole texts. Drafters read only the written part.
        num_prompt_tokens: prompt tokens of each request.
    """

    def __init__(self, names: Sequence[str], token_ids: Int32Array, num_prompt_tokens: int) -> None:
        size = len(names)
        self.req_ids = list(names)
        self.req_id_to_index = {name: row for row, name in enumerate(names)}
        self.token_ids_cpu = token_ids
        self.num_prompt_tokens = np.full(size, num_prompt_tokens, np.int32)
        self.num_tokens_no_spec = self.num_prompt_tokens.copy()


class Side(Protocol):
    """One competitor."""

    def learn(self, name: str, text: Int32Array) -> None:
        """Learns a text as the output of an earlier request."""
        ...

    def begin(self, requests: Requests) -> None:
        """Begins to decode these requests. Their prompts are read here."""
        ...

    def step(self, sampled: Drafts, verified: Drafts) -> Callable[[], Drafts]:
        """Returns the function to time: all the drafting work after a step.

        Args:
            sampled: new tokens of each request. The texts already have them.
            verified: drafts that the step verified.
        """
        ...


class Hook:
    """Our hook with these sources, called as by the worker.

    Args:
        config: the application, with sources that need no model.
        max_model_len: limit in tokens.
    """

    def __init__(self, config: AppConfig, max_model_len: int) -> None:
        vllm_config: Any = SimpleNamespace(
            additional_config={"specserve": config.model_dump(mode="json")},
            model_config=SimpleNamespace(
                max_model_len=max_model_len, get_vocab_size=lambda: VOCAB_SIZE
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=256),
            observability_config=SimpleNamespace(per_request_spec_decode_metrics="none"),
            lora_config=None,
        )
        self._hook = ProposerHook(vllm_config)
        self._runner = SimpleNamespace(
            model_config=SimpleNamespace(has_inner_state=False, is_hybrid=False),
            requests={},
            input_batch=None,
        )
        self._hook.attach(self._runner)

    def learn(self, name: str, text: Int32Array) -> None:
        requests = Requests([name], text[None], 1)
        self._hold(requests)
        requests.num_tokens_no_spec[:] = len(text)
        self._propose(_scheduled([name], [[]], len(text)), [text[1:].tolist()])
        self._hook.forget([name])

    def begin(self, requests: Requests) -> None:
        self._hold(requests)
        # As in steps that read a prompt in chunks, of which the sources take some at a time.
        partly = _scheduled(requests.req_ids, [[]] * len(requests.req_ids), 2)
        for _ in range(2 + int(requests.num_prompt_tokens.sum()) // 2048):
            self._propose(partly, [[] for _ in requests.req_ids])

    def step(self, sampled: Drafts, verified: Drafts) -> Callable[[], Drafts]:
        names = self._runner.input_batch.req_ids
        scheduled = _scheduled(names, verified, 1)

        def call() -> Drafts:
            if not self._hook.is_idle(scheduled):
                return self._propose(scheduled, sampled)
            self._hook.note_idle_step(sampled)
            return [[] for _ in names]

        return call

    def _hold(self, requests: Requests) -> None:
        self._runner.input_batch = requests
        request = SimpleNamespace(
            sampling_params=SamplingParams(max_tokens=1 << 20),
            lora_request=None,
            prompt_token_ids=[1],
            prompt_embeds=None,
            mm_features=[],
        )
        self._runner.requests = dict.fromkeys(requests.req_ids, request)

    def _propose(self, scheduled: Any, sampled: Drafts) -> Drafts:
        return self._hook.propose_draft_token_ids(scheduled, sampled, None, None)


class Trie:
    """Only our draft memory: learning and lookup.

    Args:
        batch: number of requests decoded at a time.
        is_full: whether it is full of other text.
    """

    def __init__(self, batch: int, *, is_full: bool = False) -> None:
        memory = TrieMemory(MAX_BYTES, [NAMESPACE])
        trie = memory.tries().get(NAMESPACE)
        assert trie is not None
        self._trie = trie
        rng = np.random.default_rng(1 << 32)
        while is_full and not trie.num_evicted_tokens:
            learn(trie, rng.integers(0, VOCAB_SIZE, 1 << 16, np.int32))
        config = TrieConfig(kind="trie", max_draft_len=DRAFT_LEN, share="replica")
        self._source = TrieSource(config, memory, SourceContext(num_slots=batch))
        self._slots, self._limits = np.arange(batch), np.full(batch, DRAFT_LEN, np.int32)
        self._drafts = types.Drafts.empty(batch, DRAFT_LEN)

    def learn(self, name: str, text: Int32Array) -> None:
        learn(self._trie, text)

    def begin(self, requests: Requests) -> None:
        self._requests = requests
        for slot in self._slots.tolist():
            self._source.open(slot, RequestControls())
        for _ in range(int(requests.num_prompt_tokens.sum()) // LEARN_TOKENS_PER_STEP + 1):
            self._source.propose(self._question(), self._limits, self._drafts)

    def step(self, sampled: Drafts, verified: Drafts) -> Callable[[], Drafts]:
        def call() -> Drafts:
            self._drafts.lengths[:] = 0
            self._source.propose(self._question(), self._limits, self._drafts)
            rows = zip(self._drafts.tokens.tolist(), self._drafts.lengths.tolist(), strict=True)
            return [tokens[:length] for tokens, length in rows]

        return call

    def _question(self) -> DraftBatch:
        requests = self._requests
        return DraftBatch(
            self._slots,
            requests.token_ids_cpu,
            requests.num_tokens_no_spec,
            requests.num_prompt_tokens,
        )


def ngram_proposer(
    settings: Mapping[str, Any], max_num_seqs: int, max_model_len: int
) -> VllmNgramProposer:
    """vLLM's prompt lookup, with its settings of ``speculative_config``."""
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(**settings),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        # Its own warm-up uses a batch of 1,024.
        scheduler_config=SimpleNamespace(max_num_seqs=max(max_num_seqs, 1024)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    return VllmNgramProposer(config)


class VllmNgram:
    """vLLM's prompt lookup.

    Args:
        low: shortest match in tokens.
        high: longest match in tokens.
        max_num_seqs: largest batch.
        max_model_len: limit in tokens.
    """

    def __init__(self, low: int, high: int, max_num_seqs: int, max_model_len: int) -> None:
        self._proposer = ngram_proposer(
            {
                "prompt_lookup_min": low,
                "prompt_lookup_max": high,
                "num_speculative_tokens": DRAFT_LEN,
            },
            max_num_seqs,
            max_model_len,
        )

    def learn(self, name: str, text: Int32Array) -> None:
        return

    def begin(self, requests: Requests) -> None:
        self._requests = requests

    def step(self, sampled: Drafts, verified: Drafts) -> Callable[[], Drafts]:
        return lambda: self._proposer.propose(
            DRAFT_LEN, sampled, self._requests.num_tokens_no_spec, self._requests.token_ids_cpu
        )


class VllmSuffixSide:
    """vLLM's suffix decoding with its default settings."""

    def __init__(self) -> None:
        self._peer = VllmSuffix(DRAFT_LEN)
        self.learn = self._peer.learn

    def begin(self, requests: Requests) -> None:
        self._requests = requests

    def step(self, sampled: Drafts, verified: Drafts) -> Callable[[], Drafts]:
        return lambda: self._peer.proposer.propose(DRAFT_LEN, self._requests, sampled)


def _scheduled(names: Sequence[str], verified: Drafts, num_others: int) -> Any:
    """vLLM's scheduler output of a step with these drafts and other tokens of each request."""
    drafts = dict(zip(names, verified, strict=True))
    num_tokens = {name: num_others + len(draft) for name, draft in drafts.items()}
    return SimpleNamespace(
        scheduled_spec_decode_tokens={name: draft for name, draft in drafts.items() if draft},
        num_scheduled_tokens=num_tokens,
        total_num_scheduled_tokens=sum(num_tokens.values()),
        finished_req_ids=set(),
    )
