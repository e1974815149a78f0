"""Time per request of our memory while another thread teaches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specserve.core.source_config import TrieConfig
from specserve.core.types import DraftBatch, Drafts, Int32Array, RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.trie import LEARN_TOKENS_PER_STEP, TrieSource
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.records import Record
from specserve.trie.token_trie import TokenTrie
from specserve.trie.unsent import FULL_TOKENS
from tests.peers.replay import NAMESPACE, learn

BATCH, GROWTH, STEPS = 32, 2, 250
PROMPT_TOKENS, DRAFT_LEN = 400, 16
LEARNED_TOKENS_PER_S = 100_000
BURST_S = 0.1
LEARNING_S = 8.0
FORWARD_S = 0.005
"""Pause between two calls, in place of an engine's forward pass."""


def learn_all(trie: TokenTrie, texts: Sequence[Int32Array]) -> None:
    for text in texts:
        learn(trie, text)


class Batch:
    """32 requests that grow.

    Args:
        texts: texts from which they are cut at random places.
        rng: chooses the places.
    """

    def __init__(self, texts: Sequence[Int32Array], rng: np.random.Generator) -> None:
        width = PROMPT_TOKENS + GROWTH * (STEPS + 1)
        pool = [text for text in texts if len(text) > width]
        picked = [pool[i] for i in rng.integers(0, len(pool), BATCH)]
        begins = [int(rng.integers(0, len(text) - width)) for text in picked]
        rows = [t[b : b + width] for t, b in zip(picked, begins, strict=True)]
        lengths = np.full(BATCH, PROMPT_TOKENS, np.int32)
        self.question = DraftBatch(np.arange(BATCH), np.stack(rows), lengths, lengths)
        self.limits = np.full(BATCH, DRAFT_LEN, np.int32)

    def grow(self) -> None:
        num_tokens = self.question.num_tokens + np.int32(GROWTH)
        self.question = self.question._replace(num_tokens=num_tokens)


class TaughtMemory:
    """A draft memory with its source.

    Args:
        texts: whole files that it has learned.
        max_bytes: size of the memory.
    """

    def __init__(self, texts: Sequence[Int32Array], max_bytes: int) -> None:
        self.memory = TrieMemory(max_bytes, [NAMESPACE])
        config = TrieConfig(kind="trie", max_draft_len=DRAFT_LEN, share="replica")
        self._source = TrieSource(config, self.memory, SourceContext(num_slots=BATCH))
        trie = self.memory.tries().get(NAMESPACE)
        assert trie is not None
        learn_all(trie, texts)

    def steps(self, batch: Batch) -> list[float]:
        """Seconds of the source's whole work in each step. Reading the prompts is not timed."""
        drafts = Drafts.empty(BATCH, DRAFT_LEN)
        for slot in range(BATCH):
            self._source.open(slot, RequestControls())
        for _ in range(BATCH * PROMPT_TOKENS // LEARN_TOKENS_PER_STEP + 1):
            self._source.propose(batch.question, batch.limits, drafts)
        times = []
        for _ in range(STEPS):
            batch.grow()
            began = time.perf_counter()
            self._source.propose(batch.question, batch.limits, drafts)
            times.append(time.perf_counter() - began)
            time.sleep(FORWARD_S)
        self._source.close(batch.question.slots)
        return times


class Stream(threading.Thread):
    """Teaches other replicas' text like the link to the store: records in bursts.

    Args:
        memory: the memory to teach.
        texts: text of the other replicas.
    """

    def __init__(self, memory: TrieMemory, texts: Sequence[Int32Array]) -> None:
        super().__init__(daemon=True)
        self.num_tokens, self.seconds = 0, 0.0
        self._learner = ClusterLearner(memory)
        self._records = [
            Record(
                origin="other",
                number=1,
                stamp=0.0,
                namespace=NAMESPACE,
                sequence=f"other-{number}",
                start=start,
                tokens=text[start : start + FULL_TOKENS].tobytes(),
                final=start + FULL_TOKENS >= len(text),
            )
            for number, text in enumerate(texts)
            for start in range(0, len(text), FULL_TOKENS)
        ]
        self._stopping = threading.Event()

    def run(self) -> None:
        began = time.perf_counter()
        for record in self._records:
            due = began + self.num_tokens / LEARNED_TOKENS_PER_S
            if due - time.perf_counter() > BURST_S:
                self._stopping.wait(BURST_S)
            if self._stopping.is_set():
                break
            self._learner.apply(record)
            self.num_tokens += record.num_tokens
        self.seconds = time.perf_counter() - began

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def measure_while_learning(
    memory: TaughtMemory, texts: Mapping[str, Sequence[Int32Array]], stream: Stream, seed: int
) -> list[dict[str, Any]]:
    """Microseconds per request of a step while the stream is learned."""
    rng = np.random.default_rng(seed)
    times: dict[str, list[float]] = {kind: [] for kind in texts}
    stream.start()
    begin = time.perf_counter()
    while time.perf_counter() - begin < LEARNING_S and stream.is_alive():
        for kind, of_kind in texts.items():
            times[kind] += memory.steps(Batch(of_kind, rng))
    stream.stop()
    rate = round(stream.num_tokens / stream.seconds)
    return [
        {"text": kind, **_in_us(seconds), "learned_tokens_per_s": rate}
        for kind, seconds in times.items()
    ]


def _in_us(seconds: Sequence[float]) -> dict[str, float]:
    values = np.array(seconds) / BATCH * 1e6
    return {
        "median": round(float(np.median(values)), 2),
        "p99": round(float(np.percentile(values, 99)), 2),
        "worst": round(float(values.max()), 1),
    }
