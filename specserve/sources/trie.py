"""Memory decoding: what followed the last times that a text stood where the request's stands now.

See :mod:`specserve.trie.token_trie` for where it comes from. The source learns from every request
while it is written: what one wrote in this step, all can draft in the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from typing import Self

import numpy as np
from msgspec.structs import replace

from specserve.core.compile import kernel_array
from specserve.core.metrics import TrieSnapshot
from specserve.core.source_config import TrieConfig
from specserve.core.types import Draft, DraftBatch, Int32Array, RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.controls import NO_TENANT, wants_drafts
from specserve.sources.trie_misses import TrieMisses
from specserve.trie.memory import KEPT_S, SharedMemory, TrieMemory
from specserve.trie.namespaces import label, namespace
from specserve.trie.token_trie import Int64Array, TokenTrie

LEARN_TOKENS_PER_STEP = 4096
"""Tokens of long prompts that are learned in one step over all requests, 2 to 4 ms of work."""

_SMALL_TOKENS = 256
"""What a step or a short prompt adds: no other request's long prompt makes it wait."""

_NO_DRAFT = Draft((), "trie_local")
_DEFAULT = RequestControls()


@dataclass(slots=True)
class _Request:
    """A request's text as far as it was learned.

    Attributes:
        name: the text's, in the trie and in the cluster.
        namespace: whose it is.
        trie: where it is learned; None without room for it, or where nobody would draft from it.
        private: nobody else may learn from it.
        num_learned: tokens learned so far.
    """

    name: str
    namespace: str
    trie: TokenTrie | None
    private: bool
    num_learned: int = 0


class TrieSource:
    """Drafts from a replica's memory, and fills it.

    A request that must not be learned from (``learn`` 0) drafts from the memory too, and its own
    text is in it for itself alone until it ends.

    Args:
        config: the source's configuration.
        memory: what is drafted from.
        context: the replica.
        shared: the way to the other replicas; None: there is none.
    """

    def __init__(
        self,
        config: TrieConfig,
        memory: TrieMemory,
        context: SourceContext,
        shared: SharedMemory | None = None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._identity = context.model_identity
        self._label_key = context.label_key
        self._misses = TrieMisses(context.metrics)
        self._shared = shared
        self._requests: dict[str, _Request] = {}
        self._name, self._num_opened = token_hex(8), 0
        context.metrics.watch_trie(self.snapshot)
        self._warm_up()

    @classmethod
    def build(cls, config: TrieConfig, context: SourceContext) -> Self:
        """For the registry: with its own memory, joined to the cluster's where it is shared."""
        identity = context.model_identity
        tenants = ("",) if config.share_tenants else context.tenants or ("",)
        memory = TrieMemory(
            config.max_bytes,
            [namespace(identity, tenant=tenant) for tenant in tenants],
            context.num_adapters,
            [namespace(identity, name, each) for each in tenants for name in context.adapters],
        )
        shared = None
        if config.share == "cluster" and context.share is not None:
            shared = context.share(config, memory)
        return cls(config, memory, context, shared)

    def propose(self, batch: DraftBatch) -> list[Draft]:
        """Learns what is new in each request's text, and looks up what may follow it."""
        if not len(batch):
            return []
        token_ids = kernel_array(batch.token_ids, np.int32)
        num_tokens = kernel_array(batch.num_tokens, np.int32)
        limits = np.minimum(batch.max_draft_tokens, self._config.max_draft_len, dtype=np.int32)
        batch_rows = self._rows_by_trie(batch)
        ends = self._learn_until(batch, num_tokens)
        drafts = [_NO_DRAFT] * len(batch)
        names = [self._requests[request_id].name for request_id in batch.request_ids]
        for trie, rows in batch_rows:
            self._learn(trie, rows, batch, names, token_ids, ends)
            if not limits[rows].any():
                continue
            found = trie.lookup(
                token_ids,
                num_tokens,
                limits,
                names,
                rows=rows,
                min_match_len=self._config.min_match_len,
            )
            for row in rows[found.lengths[rows] > 0].tolist():
                drafts[row] = Draft(
                    tuple(found.tokens[row, : found.lengths[row]].tolist()),
                    "trie_cluster" if found.from_cluster[row] else "trie_local",
                    int(found.match_lens[row]),
                    tuple(found.chances[row, : found.lengths[row]].tolist()),
                )
        return drafts

    def forget(self, request_ids: list[str]) -> None:
        """Closes these requests' texts; what was learned of them stays."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is None or request.trie is None:
                continue
            request.trie.finish(request.name)
            self._memory.release(request.namespace)
            if self._shared is not None and not request.private:
                end, nothing = request.num_learned, np.empty(0, np.int32)
                self._shared.publish(request.namespace, request.name, end, nothing, final=True)

    def snapshot(self) -> TrieSnapshot:
        """What is in the memory now; for any thread."""
        link = None if self._shared is None else self._shared.link()
        namespaces = (
            replace(each, namespace=label(each.namespace, self._label_key))
            for each in self._memory.snapshot()
        )
        return TrieSnapshot(tuple(namespaces), link)

    def _rows_by_trie(self, batch: DraftBatch) -> list[tuple[TokenTrie, Int64Array]]:
        """The batch's rows, together where they share a trie."""
        rows: dict[TokenTrie, list[int]] = {}
        for row, request_id in enumerate(batch.request_ids):
            request = self._requests.get(request_id)
            if request is None:
                controls = batch.controls[row] if batch.controls else _DEFAULT
                request = self._requests[request_id] = self._open(request_id, controls)
            if request.trie is not None:
                rows.setdefault(request.trie, []).append(row)
        return [(trie, np.array(each, np.int64)) for trie, each in rows.items()]

    def _open(self, request_id: str, controls: RequestControls) -> _Request:
        tenant = "" if self._config.share_tenants else controls.tenant
        of = namespace(self._identity, controls.adapter, tenant)
        # A client may choose its request's id, and so another one's: the text's name is our own.
        name = f"{self._name}-{self._num_opened:x}"
        self._num_opened += 1
        if not (controls.learn or wants_drafts(controls, "trie")):
            return _Request(name, of, None, private=True)
        trie = None if controls.tenant == NO_TENANT else self._memory.for_request(of)
        miss = "" if trie is not None else self._why_none(of, controls)
        if trie is not None and not trie.open(name, private=not controls.learn):
            self._memory.release(of)
            trie, miss = None, "a text found no room: more are open than max_bytes has pages for"
        self._misses.note(of, miss)
        return _Request(name, of, trie, not controls.learn)

    def _why_none(self, of: str, controls: RequestControls) -> str:
        """Why a request finds no trie; names neither tenant nor adapter, since all may read it."""
        if controls.tenant == NO_TENANT or not self._memory.has_tenant(of):
            return "a request's tenant is not configured"
        return (
            f"an adapter's request found no trie: a tenant has {self._memory.num_adapters} "
            f"(max_cpu_loras), and an adapter keeps one for {KEPT_S:g} s after its last request"
        )

    def _learn_until(self, batch: DraftBatch, num_tokens: Int32Array) -> Int64Array:
        """Up to where each text is learned in this step."""
        requests = [self._requests[request_id] for request_id in batch.request_ids]
        learned = np.array([request.num_learned for request in requests], np.int64)
        missing = np.maximum(num_tokens - learned, 0)
        if missing.max() > _SMALL_TOKENS:
            left = LEARN_TOKENS_PER_STEP
            for row in np.flatnonzero(missing > _SMALL_TOKENS).tolist():
                missing[row] = min(int(missing[row]), left)
                left -= int(missing[row])
        ends: Int64Array = learned + missing
        return ends

    def _learn(
        self,
        trie: TokenTrie,
        rows: Int64Array,
        batch: DraftBatch,
        names: list[str],
        token_ids: Int32Array,
        ends: Int64Array,
    ) -> None:
        """Learns these rows' new tokens, and tells the other replicas."""
        begins = ends.copy()  # of the rows that are not this trie's, nothing
        num_prompt_tokens = batch.num_prompt_tokens.astype(np.int64)
        for row in rows.tolist():
            request = self._requests[batch.request_ids[row]]
            begin = request.num_learned
            request.num_learned = end = int(ends[row])
            if not self._config.learn_prompts:
                begin = min(max(begin, int(num_prompt_tokens[row])), end)
            begins[row] = begin
            if self._shared is not None and not request.private and begin < end:
                self._shared.publish(
                    request.namespace,
                    request.name,
                    begin,
                    token_ids[row, begin:end],
                    min(max(int(num_prompt_tokens[row]) - begin, 0), end - begin),
                )
        trie.append_rows(names, token_ids, begins, ends, num_prompt_tokens)

    def _warm_up(self) -> None:
        """Compiles the kernels, or loads them from numba's cache: no request waits for that."""
        trie = TokenTrie(1 << 20)
        tokens, one = np.zeros((1, 8), np.int32), np.ones(1, np.int32)
        trie.open("\0warm-up")
        trie.append_rows(
            ["\0warm-up"],
            tokens,
            np.zeros(1, np.int64),
            8 * one.astype(np.int64),
            one.astype(np.int64),
        )
        trie.lookup(tokens, 8 * one, one, ["\0warm-up"], rows=np.zeros(1, np.int64))
        trie.remove("\0warm-up")
