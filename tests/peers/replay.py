"""Replay: drafts for known texts, without a model.

A draft token is accepted if it is the next token of the text. So this compares only drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from specserve.core.source_config import TrieConfig
from specserve.core.types import DraftBatch, Int32Array, RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.trie import TrieSource
from specserve.trie.memory import TrieMemory
from specserve.trie.namespaces import namespace
from specserve.trie.token_trie import TokenTrie
from tests.draft_batches import propose
from tests.peers.suffix_peer import VllmSuffix
from tests.peers.texts import Tally, Text, num_same

NAMESPACE = namespace("")
"""The namespace of a :class:`TrieSource` without a context."""


class Drafter(Protocol):
    """One competitor."""

    def learn(self, name: str, text: Int32Array) -> None:
        """Learns a text as the output of an earlier request."""
        ...

    def draft(self, text: Text, num_tokens: int, num_new: int) -> Sequence[int]:
        """A draft after ``text.tokens[:num_tokens]``, of which the last ``num_new`` are new."""
        ...

    def finish(self, text: Text) -> None:
        """Ends the request."""
        ...


def replay(drafter: Drafter, texts: Iterable[Text]) -> Tally:
    """Replays requests one after the other."""
    tally = Tally()
    for text in texts:
        replay_one(drafter, text, tally)
    return tally


def replay_one(drafter: Drafter, text: Text, tally: Tally) -> None:
    """Replays one request. The prompt's step writes one token."""
    end = len(text.tokens)
    position, num_new = text.num_prompt_tokens + 1, 1
    while True:
        # The last call has no use for its draft, but lets the drafter learn the whole text.
        draft = drafter.draft(text, position, num_new)
        if position >= end:
            break
        draft = draft[: end - position]
        accepted = num_same(draft, text.tokens[position:])
        tally.steps += 1
        tally.drafts += bool(draft)
        tally.drafted += len(draft)
        tally.accepted += accepted
        num_new = min(accepted + 1, end - position)
        position += num_new
    drafter.finish(text)


def learn(trie: TokenTrie, text: Int32Array) -> None:
    """Learns a text of an earlier request."""
    sequence = trie.open()
    trie.append(sequence, text)
    trie.finish(sequence)


class TrieDrafter:
    """Our draft memory. Every draft is sent in full.

    Args:
        memory: the memory, which has ``NAMESPACE``.
        max_draft_len: longest draft in tokens.
        private: whether it forgets each request at its end.
    """

    def __init__(self, memory: TrieMemory, max_draft_len: int, *, private: bool = False) -> None:
        trie = memory.tries().get(NAMESPACE)
        assert trie is not None
        self._trie = trie
        config = TrieConfig(kind="trie", max_draft_len=max_draft_len, share="replica")
        self._source = TrieSource(config, memory, SourceContext(num_slots=1))
        self._controls = RequestControls(learn=not private)
        self._slot, self._limit = np.zeros(1, np.int64), np.full(1, max_draft_len, np.int32)

    def learn(self, name: str, text: Int32Array) -> None:
        learn(self._trie, text)

    def draft(self, text: Text, num_tokens: int, num_new: int) -> Sequence[int]:
        if num_tokens - num_new == text.num_prompt_tokens:
            self._source.open(0, self._controls)
        batch = DraftBatch(
            self._slot,
            text.tokens[None],
            np.array([num_tokens], np.int32),
            np.array([text.num_prompt_tokens], np.int32),
        )
        drafts = propose(self._source, batch, self._limit)
        guess: list[int] = drafts.tokens[0, : drafts.lengths[0]].tolist()
        return guess

    def finish(self, text: Text) -> None:
        self._source.close(self._slot)


class SuffixDrafter:
    """vLLM's suffix decoding.

    Args:
        max_draft_len: longest draft in tokens.
    """

    def __init__(self, max_draft_len: int) -> None:
        self._peer = VllmSuffix(max_draft_len)
        self.learn = self._peer.learn

    def draft(self, text: Text, num_tokens: int, num_new: int) -> Sequence[int]:
        return self._peer.propose(
            [text.name],
            text.tokens[None],
            np.array([num_tokens], np.int32),
            np.array([text.num_prompt_tokens], np.int32),
            [text.tokens[num_tokens - num_new : num_tokens].tolist()],
        )[0]

    def finish(self, text: Text) -> None:
        self._peer.cache.stop_request(text.name)


MakeDrafter = Callable[[], Drafter]
