"""Learns what other replicas publish."""

from __future__ import annotations

import time
from collections import OrderedDict

from specserve.trie.memory import TrieMemory
from specserve.trie.records import Record
from specserve.trie.token_trie import NO_SEQUENCE

MOST_GROWING = 4096
"""Texts of other replicas that are held ready to go on; the oldest of more is closed."""

_SLICE_TOKENS = 256
"""Learned in one go, some 0.1 ms: a decoding step waits no longer for the memory."""


class ClusterLearner:
    """Puts records into a replica's memory, in slices between which decoding steps get their turn.

    Args:
        memory: the replica's.
    """

    def __init__(self, memory: TrieMemory) -> None:
        self._memory = memory
        self._ends: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def apply(self, record: Record) -> None:
        """Learns a piece of a text, or forgets what the record says."""
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
        if self._ends.pop(key, (0, -1)) != (sequence, record.start):
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
        self._ends[key] = sequence, record.start + len(tokens)
        if len(self._ends) > MOST_GROWING:
            (namespace, _), (oldest, _) = self._ends.popitem(last=False)
            if (other := self._memory.of(namespace)) is not None:
                other.finish(oldest)
