"""Memory decoding: drafts the tokens that followed the request's last tokens in any earlier text.

:mod:`specserve.trie.token_trie` names the papers. The source learns from requests while they run:
tokens written in one step can be drafted for all requests of the namespace in the next one.
"""

from __future__ import annotations

from collections import defaultdict
from secrets import token_hex
from typing import Self

import numpy as np
from msgspec.structs import replace

from specserve.core.metrics import TrieSnapshot
from specserve.core.source_config import TrieConfig
from specserve.core.types import (
    DraftBatch,
    Drafts,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.sources.controls import NO_TENANT, wants_drafts
from specserve.sources.passing_reasons import PassingReasons
from specserve.trie.memory import KEPT_S, SharedMemory, TrieMemory
from specserve.trie.namespaces import label, namespace
from specserve.trie.token_trie import NO_SEQUENCE, TokenTrie
from specserve.trie.unsent import UnsentTexts

LEARN_TOKENS_PER_STEP = 4096
"""Most tokens of long prompts learned in one step, over all requests: 1 to 2 ms. Of a text that
ends with more unlearned tokens, so many of the last ones are learned."""


class TrieSource:
    """Drafts from a replica's memory of texts, and adds the texts of its requests.

    A request with ``learn`` 0 drafts from the memory too. Its own text is private to it and is
    removed when it ends.

    Args:
        config: the source's configuration.
        memory: the memory that is drafted from.
        context: the replica.
        shared: sends texts to the other replicas; None: the memory is not shared.
    """

    def __init__(
        self,
        config: TrieConfig,
        memory: TrieMemory,
        context: SourceContext,
        shared: SharedMemory | None = None,
    ) -> None:
        size = context.num_slots
        self._config = config
        self._memory = memory
        self._identity = context.model_identity
        self._label_key = context.label_key
        self._misses = PassingReasons(context.metrics, config.kind)
        self._shared = shared
        self._unsent = None if shared is None else UnsentTexts(shared, size)
        self._text_prefix, self._num_opened = token_hex(8), 0
        self._tries: list[TokenTrie | None] = [None] * size  # by slot
        self._groups: dict[bytes, dict[TokenTrie, Int64Array]] = {}
        self._namespaces = [""] * size
        self._sequences = np.full(size, NO_SEQUENCE, np.int64)
        self._num_learned = np.zeros(size, np.int64)
        self._begins, self._ends = np.zeros(size, np.int64), np.zeros(size, np.int64)
        context.metrics.watch_trie(self.snapshot)

    @classmethod
    def build(cls, config: TrieConfig, context: SourceContext) -> Self:
        """Makes the source with a new memory, connected to the cluster's if it is shared."""
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

    def open(self, slot: int, controls: RequestControls) -> None:
        """See :class:`specserve.sources.base.Source`."""
        self._sequences[slot], self._num_learned[slot] = NO_SEQUENCE, 0
        self._put(slot, None)
        if not (controls.learn or wants_drafts(controls, "trie")):
            return
        tenant = "" if self._config.share_tenants else controls.tenant
        of = namespace(self._identity, controls.adapter, tenant)
        if controls.began and self._memory.was_purged_since(of, controls.began):
            return
        trie = None if controls.tenant == NO_TENANT else self._memory.for_request(of)
        if trie is None:
            self._misses.note(of, self._why_none(of, controls))
            return
        sequence = trie.open(private=not controls.learn)
        if sequence == NO_SEQUENCE:
            self._memory.release(of)
            reason = "a text found no room: more texts are open than max_bytes has pages for"
            self._misses.note(of, reason)
            return
        self._misses.note(of, "")
        self._namespaces[slot], self._sequences[slot] = of, sequence
        self._put(slot, trie)
        if self._unsent is not None and controls.learn:
            # Not the request's id: clients may choose it, and two may choose the same.
            self._unsent.open(slot, of, f"{self._text_prefix}-{self._num_opened:x}", controls.began)
            self._num_opened += 1

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        """See :class:`specserve.sources.base.Source`; learns from all rows, then looks up."""
        slots, size = batch.slots, len(limits)
        arrays = batch[:4]
        begins, ends, budget = self._begins[:size], self._ends[:size], LEARN_TOKENS_PER_STEP
        for trie, rows in self._rows_by_trie(slots).items():
            budget = trie.step(
                rows,
                arrays,
                limits,
                self._sequences,
                self._num_learned,
                begins,
                ends,
                drafts,
                skips_prompts=not self._config.learn_prompts,
                budget=budget,
                min_match_len=self._config.min_match_len,
            )
            if self._unsent is not None:
                self._unsent.add(arrays, begins, ends)

    def finish(self, batch: DraftBatch) -> None:
        """See :class:`specserve.sources.base.LearningSource`."""
        slots = batch.slots
        is_learned = self._sequences[slots] != NO_SEQUENCE
        firsts = batch.num_tokens - LEARN_TOKENS_PER_STEP
        behind = np.flatnonzero((self._num_learned[slots] < firsts) & is_learned)
        for row, slot in zip(behind.tolist(), slots[behind].tolist(), strict=True):
            if (trie := self._tries[slot]) is not None:
                trie.skip(int(self._sequences[slot]))
            self._num_learned[slot] = firsts[row]
        left = np.maximum(batch.num_tokens - self._num_learned[slots], 0)
        limits, drafts = np.zeros(len(slots), np.int32), Drafts.empty(len(self._tries), 1)
        for _ in range(1 + int(left[is_learned].sum()) // LEARN_TOKENS_PER_STEP):
            self.propose(batch, limits, drafts)

    def close(self, slots: Int64Array) -> None:
        """See :class:`specserve.sources.base.Source`; learned text stays in the memory."""
        for slot in slots.tolist():
            if (trie := self._tries[slot]) is None:
                continue
            trie.finish(int(self._sequences[slot]))
            self._memory.release(self._namespaces[slot])
            self._put(slot, None)
            self._sequences[slot] = NO_SEQUENCE
            if self._unsent is not None:
                self._unsent.close(slot)

    def snapshot(self) -> TrieSnapshot:
        """State of the memory now; for any thread."""
        link = None if self._shared is None else self._shared.link()
        namespaces = (
            replace(each, namespace=label(each.namespace, self._label_key))
            for each in self._memory.snapshot()
        )
        return TrieSnapshot(tuple(namespaces), link)

    def _put(self, slot: int, trie: TokenTrie | None) -> None:
        self._tries[slot] = trie
        self._groups.clear()

    def _rows_by_trie(self, slots: Int64Array) -> dict[TokenTrie, Int64Array]:
        """The batch's rows, grouped by trie. Kept, as the next step usually has the same slots."""
        key = slots.tobytes()
        if key not in self._groups:
            rows: defaultdict[TokenTrie | None, list[int]] = defaultdict(list)
            for row, slot in enumerate(slots.tolist()):
                rows[self._tries[slot]].append(row)
            self._groups = {
                key: {trie: np.array(each) for trie, each in rows.items() if trie is not None}
            }
        return self._groups[key]

    def _why_none(self, of: str, controls: RequestControls) -> str:
        """Why a request has no trie; without tenant and adapter names, as all tenants see it."""
        if controls.tenant == NO_TENANT or not self._memory.has_tenant(of):
            return "a request's tenant is not configured"
        return (
            f"an adapter's request found no trie: a tenant has {self._memory.num_adapters} "
            f"(max_cpu_loras), and an adapter keeps one for {KEPT_S:g} s after its last request"
        )
