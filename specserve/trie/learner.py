"""Learns what other replicas publish."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from specserve.trie.memory import TrieMemory
from specserve.trie.records import Record
from specserve.trie.token_trie import NO_SEQUENCE, TokenTrie

MOST_GROWING = 4096
"""Texts of other replicas that a namespace holds ready to go on; the oldest of more is closed."""

_GROWING_SHARE = 4
"""They keep a quarter of a trie's pages at most: a new replica reads many that never ended."""

SILENT_S = 600.0
"""A text that nothing was heard of for so long is closed: its replica may have died."""

_SLICE_TOKENS = 256
"""Learned in one go, some 0.1 ms: a decoding step waits no longer for the memory."""


class _Growing(NamedTuple):
    """A text that goes on: its sequence in its trie, its end, and when it was heard of."""

    trie: TokenTrie
    sequence: int
    end: int
    heard_at: float

    def goes_on(self, trie: TokenTrie, start: int) -> bool:
        """Whether what starts there follows it, in the same trie."""
        return self.trie is trie and self.end == start and trie.is_open(self.sequence)


class ClusterLearner:
    """Puts records into a replica's memory, in slices between which decoding steps get their turn.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, memory: TrieMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._clock = memory, clock
        # By namespace and name, the one last heard of last.
        self._growing: defaultdict[str, OrderedDict[str, _Growing]] = defaultdict(OrderedDict)

    def apply(self, record: Record) -> None:
        """Learns a piece of a text, or forgets what the record says."""
        if record.kind == "purge":
            self._memory.clear(record.namespace)
            return
        trie = self._memory.for_record(record.namespace)
        if trie is None:
            return
        now, growing = self._clock(), self._growing[record.namespace]
        most = min(MOST_GROWING, trie.num_pages // _GROWING_SHARE)
        known = growing.pop(record.sequence, None)
        while growing and (len(growing) >= most or _oldest(growing).heard_at < now - SILENT_S):
            _, oldest = growing.popitem(last=False)
            oldest.trie.finish(oldest.sequence)
        if known is not None and known.goes_on(trie, record.start):
            sequence = known.sequence
        else:
            if known is not None:
                known.trie.finish(known.sequence)
            sequence = trie.open(from_cluster=True)  # nobody knows what was before
            if sequence == NO_SEQUENCE:
                return
        tokens = record.token_array()
        for begin in range(0, len(tokens), _SLICE_TOKENS):
            piece = tokens[begin : begin + _SLICE_TOKENS]
            num_prompt_tokens = min(max(record.num_prompt_tokens - begin, 0), len(piece))
            trie.append(sequence, piece, num_prompt_tokens=num_prompt_tokens)
            time.sleep(0)  # a waiting step gets the lock first
        if record.final:
            trie.finish(sequence)
        else:
            growing[record.sequence] = _Growing(trie, sequence, record.start + len(tokens), now)


def _oldest(growing: OrderedDict[str, _Growing]) -> _Growing:
    return next(iter(growing.values()))
