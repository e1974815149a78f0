"""Learns what other replicas publish."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import NamedTuple
from weakref import ref

from specserve.trie.memory import TrieMemory
from specserve.trie.records import Record
from specserve.trie.token_trie import NO_SEQUENCE, TokenTrie

MAX_OPEN_TEXTS = 4096
"""Limit of open texts of other replicas in a namespace; beyond it, the oldest is closed."""

_GROWING_SHARE = 4
"""At most one open text for 4 pages of a trie: each keeps a page from eviction, and a new replica
reads many texts that never ended."""

SILENT_S = 600.0
"""Seconds without a record until a text is closed: its replica may have died."""

_SLICE_TOKENS = 256
"""Tokens learned at a time, about 0.1 ms: the longest wait of a decoding step for the trie."""


class _OpenText(NamedTuple):
    """A text without its final record; ``end`` is the position after its last token."""

    trie: ref[TokenTrie]
    """Weak, as another adapter may take the trie's place, and no record may follow."""
    sequence: int
    end: int
    last_record_at: float

    def continues_at(self, trie: TokenTrie, start: int) -> bool:
        """Whether a piece from position ``start`` in this trie can be appended to the text."""
        return self.trie() is trie and self.end == start and trie.is_open(self.sequence)

    def finish(self) -> None:
        """Closes the text, if its trie is still in use."""
        if (trie := self.trie()) is not None:
            trie.finish(self.sequence)


class ClusterLearner:
    """Learns records in slices, so that decoding steps can run in between.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, memory: TrieMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._clock = memory, clock
        # By namespace and sequence name, the one with the newest record last.
        self._open: defaultdict[str, OrderedDict[str, _OpenText]] = defaultdict(OrderedDict)

    def apply(self, record: Record) -> None:
        """Learns a text record, or forgets what a purge covers."""
        if record.kind == "purge":
            self._memory.clear(record.namespace, record.stamp)
            return
        trie = self._memory.for_record(record.namespace)
        if trie is None:
            self._open.pop(record.namespace, None)
            return
        now, texts = self._clock(), self._open[record.namespace]
        most = min(MAX_OPEN_TEXTS, trie.num_pages // _GROWING_SHARE)
        known = texts.pop(record.sequence, None)
        while texts and (len(texts) >= most or _oldest(texts).last_record_at < now - SILENT_S):
            _, oldest = texts.popitem(last=False)
            oldest.finish()
        if known is not None and known.continues_at(trie, record.start):
            sequence = known.sequence
        else:
            if known is not None:
                known.finish()
            sequence = trie.open(from_cluster=True)  # the text before it is unknown
            if sequence == NO_SEQUENCE:
                return
        tokens = record.token_array()
        for begin in range(0, len(tokens), _SLICE_TOKENS):
            trie.append(sequence, tokens[begin : begin + _SLICE_TOKENS])
            time.sleep(0)  # lets a waiting step take the lock first
        if record.final:
            trie.finish(sequence)
        else:
            end = record.start + len(tokens)
            texts[record.sequence] = _OpenText(ref(trie), sequence, end, now)


def _oldest(texts: OrderedDict[str, _OpenText]) -> _OpenText:
    return next(iter(texts.values()))
