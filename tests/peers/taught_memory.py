"""Our memory while another thread teaches it: time a request of a batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specserve.core.source_config import TrieConfig
from specserve.core.types import DraftBatch, Int32Array
from specserve.sources.base import SourceContext
from specserve.sources.trie import TrieProposer
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.pieces import FULL_TOKENS
from specserve.trie.records import Record
from specserve.trie.token_trie import TokenTrie
from tests.peers.replay import NAMESPACE

BATCH, GROWTH, STEPS = 32, 2, 250
PROMPT_TOKENS, DRAFT_LEN = 400, 16
LEARNED_TOKENS_PER_S = 100_000
BURST_S = 0.1
LEARNING_S = 8.0
FORWARD_S = 0.005
"""Between two calls while another thread learns, where an engine computes its forward."""


def learn_all(trie: TokenTrie, texts: Sequence[Int32Array]) -> None:
    for number, text in enumerate(texts):
        trie.open(str(number))
        trie.append(str(number), text)
        trie.finish(str(number))


class Batch:
    """32 requests that grow.

    Args:
        texts: what they are cut from, at random places.
        name: makes their ids.
        rng: chooses.
    """

    def __init__(self, texts: Sequence[Int32Array], name: str, rng: np.random.Generator) -> None:
        width = PROMPT_TOKENS + GROWTH * (STEPS + 1)
        pool = [text for text in texts if len(text) > width]
        picked = [pool[i] for i in rng.integers(0, len(pool), BATCH)]
        begins = [int(rng.integers(0, len(text) - width)) for text in picked]
        rows = [t[b : b + width] for t, b in zip(picked, begins, strict=True)]
        self.token_ids = np.stack(rows).astype(np.int32)
        self.names = [f"{name}-{row}" for row in range(BATCH)]
        self.lengths = np.full(BATCH, PROMPT_TOKENS, np.int32)
        self.num_prompt_tokens = np.full(BATCH, PROMPT_TOKENS, np.int32)
        self.limits = np.full(BATCH, DRAFT_LEN, np.int32)

    def grow(self) -> None:
        self.lengths = self.lengths + np.int32(GROWTH)


class TaughtMemory:
    """A memory with its proposer.

    Args:
        texts: whole files that it knows.
        max_bytes: of the memory.
    """

    def __init__(self, texts: Sequence[Int32Array], max_bytes: int) -> None:
        self.memory = TrieMemory(max_bytes, [NAMESPACE])
        config = TrieConfig(kind="trie", max_draft_len=DRAFT_LEN, share="replica")
        self._proposer = TrieProposer(config, self.memory, SourceContext())
        trie = self.memory.of(NAMESPACE)
        assert trie is not None
        self._trie = trie
        learn_all(trie, texts)

    def lookups(self, batch: Batch) -> list[float]:
        """Drafts for a growing batch; the seconds of each call's looking up alone."""
        trie, times = self._trie, []
        for name, row in zip(batch.names, batch.token_ids, strict=True):
            trie.open(name)
            trie.append(name, row[:PROMPT_TOKENS], num_prompt_tokens=PROMPT_TOKENS)
        for _ in range(STEPS):
            begins = batch.lengths.astype(np.int64)
            batch.grow()
            ends = batch.lengths.astype(np.int64)
            trie.append_rows(batch.names, batch.token_ids, begins, ends, begins)
            began = time.perf_counter()
            trie.lookup(batch.token_ids, batch.lengths, batch.limits, batch.names)
            times.append(time.perf_counter() - began)
            time.sleep(FORWARD_S)
        for name in batch.names:
            trie.finish(name)
        return times

    def steps(self, batch: Batch) -> list[float]:
        """All that the proposer does in a step; the first one, which takes the prompts, untimed."""
        times = []
        for _ in range(STEPS + 1):
            batch.grow()
            limits, num_prompt_tokens = batch.limits, batch.num_prompt_tokens
            question = DraftBatch(
                batch.names, batch.token_ids, batch.lengths, num_prompt_tokens, limits
            )
            began = time.perf_counter()
            self._proposer.propose(question)
            times.append(time.perf_counter() - began)
            time.sleep(FORWARD_S)
        self._proposer.forget(batch.names)
        return times[1:]


class Stream(threading.Thread):
    """Other replicas' text, as the link to the store hands it on: records in bursts.

    Args:
        memory: what is taught.
        texts: what was written.
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
    """Microseconds a request of looking up, and of a whole step, while the stream is learned."""
    rng = np.random.default_rng(seed)
    runs = {"lookup": memory.lookups, "step": memory.steps}
    times: dict[tuple[str, str], list[float]] = {(c, kind): [] for c in runs for kind in texts}
    stream.start()
    begin, number = time.perf_counter(), 0
    while time.perf_counter() - begin < LEARNING_S and stream.is_alive():
        for call, kind in times:
            batch = Batch(texts[kind], f"{call}-{kind}-{number}", rng)
            times[call, kind] += runs[call](batch)
        number += 1
    stream.stop()
    rate = round(stream.num_tokens / stream.seconds)
    return [
        {"text": kind, "call": call, **_in_us(seconds), "learned_tokens_per_s": rate}
        for (call, kind), seconds in times.items()
    ]


def _in_us(seconds: Sequence[float]) -> dict[str, float]:
    values = np.array(seconds) / BATCH * 1e6
    return {
        "median": round(float(np.median(values)), 2),
        "p99": round(float(np.percentile(values, 99)), 2),
        "worst": round(float(values.max()), 1),
    }
