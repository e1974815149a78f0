"""Replay: drafts against texts that are known beforehand, without a model.

A draft token is accepted if it is the next one of the text. So this compares drafters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import NgramConfig, TrieConfig
from specserve.core.types import Draft, DraftBatch, Int32Array, Outcome, RequestControls
from specserve.policy.chain import ProposerChain
from specserve.sources.base import Proposer, SourceContext
from specserve.sources.ngram import NgramSource
from specserve.sources.trie import TrieSource
from specserve.trie.memory import TrieMemory
from specserve.trie.namespaces import namespace
from tests.peers.suffix_peer import VllmSuffix

NAMESPACE = namespace("")
"""Where a :class:`TrieSource` without a context learns."""


@dataclass(frozen=True, slots=True)
class Text:
    """A request: its prompt and, from ``num_prompt_tokens`` on, what the target will write."""

    name: str
    tokens: Int32Array
    num_prompt_tokens: int


class Drafter(Protocol):
    """One competitor."""

    def learn(self, name: str, text: Int32Array) -> None:
        """Takes a text for what an earlier request wrote."""
        ...

    def draft(self, text: Text, num_tokens: int, num_new: int) -> Sequence[int]:
        """What follows ``text.tokens[:num_tokens]``, of which the last ``num_new`` are new."""
        ...

    def finish(self, text: Text) -> None:
        """The request has ended."""
        ...


@dataclass(slots=True)
class Tally:
    """What became of the drafts.

    Attributes:
        steps: steps of the target.
        drafts: steps that had a draft.
        drafted: draft tokens.
        accepted: draft tokens that were right.
    """

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def as_row(self) -> dict[str, Any]:
        """Means, for a table."""
        return {
            "accepted_per_step": round(self.accepted / self.steps, 3),
            "drafts_per_step": round(self.drafts / self.steps, 3),
            "accepted_per_draft": round(self.accepted / max(self.drafts, 1), 3),
            "acceptance_rate": round(self.accepted / max(self.drafted, 1), 3),
            "steps": self.steps,
        }


def replay(drafter: Drafter, texts: Iterable[Text]) -> Tally:
    """Requests one after the other, each to its end."""
    tally = Tally()
    for text in texts:
        replay_one(drafter, text, tally)
    return tally


def replay_one(drafter: Drafter, text: Text, tally: Tally) -> None:
    """One request; the prompt's own step writes one token."""
    end = len(text.tokens)
    position, num_new = text.num_prompt_tokens + 1, 1
    while True:
        # Once more at the end, where it is of no use: so the whole text is learned, as in vLLM.
        draft = drafter.draft(text, position, num_new)
        if position >= end:
            break
        draft = draft[: end - position]
        accepted = 0
        for token, right in zip(draft, text.tokens[position:], strict=False):
            if token != right:
                break
            accepted += 1
        tally.steps += 1
        tally.drafts += bool(draft)
        tally.drafted += len(draft)
        tally.accepted += accepted
        num_new = min(accepted + 1, end - position)
        position += num_new
    drafter.finish(text)


class ChainDrafter:
    """Our sources through the chain and its arbiter, every draft sent in full (no gate).

    Args:
        max_draft_len: of each source, in tokens.
        ngram: with prompt lookup beside the trie.
        max_bytes: of the trie.
    """

    def __init__(self, max_draft_len: int, *, ngram: bool, max_bytes: int) -> None:
        self._memory = TrieMemory(max_bytes, [NAMESPACE])
        config = TrieConfig(kind="trie", max_draft_len=max_draft_len, share="replica")
        trie = TrieSource(config, self._memory, SourceContext())
        sources: list[tuple[str, Proposer]] = [("trie", trie)]
        if ngram:
            lookup = NgramSource(NgramConfig(kind="ngram", max_draft_len=max_draft_len))
            sources.insert(0, ("ngram", lookup))
        self._chain = ProposerChain(sources, SpeculationMetrics())
        self._limits = np.full(1, max_draft_len, np.int32)
        self._last: Draft | None = None

    def learn(self, name: str, text: Int32Array) -> None:
        trie = self._memory.of(NAMESPACE)
        assert trie is not None
        trie.open(name)
        trie.append(name, text)
        trie.finish(name)

    def draft(self, text: Text, num_tokens: int, num_new: int) -> Sequence[int]:
        batch = DraftBatch(
            [text.name],
            text.tokens[None],
            np.array([num_tokens], np.int32),
            np.array([text.num_prompt_tokens], np.int32),
            self._limits,
        )
        outcomes = []
        if self._last is not None:
            new = tuple(text.tokens[num_tokens - num_new : num_tokens].tolist())
            num_accepted = min(num_new - 1, len(self._last.tokens))
            outcomes = [Outcome(text.name, self._last, num_accepted, new)]
        [self._last] = self._chain.step(batch, outcomes, [RequestControls()])
        return self._last.tokens

    def finish(self, text: Text) -> None:
        self._last = None
        self._chain.forget([text.name])


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
