"""Learns what other replicas publish."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from specserve.trie.memory import TrieMemory
from specserve.trie.records import Record
from specserve.trie.token_trie import NO_SEQUENCE

MOST_GROWING = 4096
"""Texts of other replicas that are held ready to go on; the oldest of more is closed."""

SILENT_S = 600.0
"""A text that nothing was heard of for so long is closed: its replica may have died."""

_SLICE_TOKENS = 256
"""Learned in one go, some 0.1 ms: a decoding step waits no longer for the memory."""


class _Growing(NamedTuple):
    """A text that goes on: its sequence, its end, and when it was heard of, in seconds."""

    sequence: int
    end: int
    heard_at: float


class ClusterLearner:
    """Puts records into a replica's memory, in slices between which decoding steps get their turn.

    Args:
        memory: the replica's.
        clock: monotonic seconds.
    """

    def __init__(self, memory: TrieMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._clock = memory, clock
        self._growing: OrderedDict[tuple[str, str], _Growing] = OrderedDict()  # last heard of last

    def apply(self, record: Record) -> None:
        """Learns a piece of a text, or forgets what the record says."""
        now = self._clock()
        while self._growing and next(iter(self._growing.values())).heard_at < now - SILENT_S:
            self._close_oldest()
        if record.kind == "purge":
            self._memory.clear(record.namespace)
            return
        trie = self._memory.for_record(record.namespace)
        if trie is None:
            return
        sequence = trie.open(record.sequence, learned_from="cluster")
        if sequence == NO_SEQUENCE:
            return
        key = record.namespace, record.sequence
        known = self._growing.pop(key, None)
        if known is None or known[:2] != (sequence, record.start):
            trie.skip(sequence)  # nobody knows what was before
        tokens = record.token_array()
        for begin in range(0, len(tokens), _SLICE_TOKENS):
            piece = tokens[begin : begin + _SLICE_TOKENS]
            num_prompt_tokens = min(max(record.num_prompt_tokens - begin, 0), len(piece))
            trie.append(sequence, piece, num_prompt_tokens=num_prompt_tokens)
            time.sleep(0)  # a waiting step gets the lock first
        if record.final:
            trie.finish(sequence)
            return
        self._growing[key] = _Growing(sequence, record.start + len(tokens), now)
        if len(self._growing) > MOST_GROWING:
            self._close_oldest()

    def _close_oldest(self) -> None:
        (namespace, _), oldest = self._growing.popitem(last=False)
        if (trie := self._memory.of(namespace)) is not None:
            trie.finish(oldest.sequence)
