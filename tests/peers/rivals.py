"""Our memory and the peer's, side by side: time a request of a batch, alone and while learning."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from specserve.core.source_config import TrieConfig
from specserve.core.types import DraftBatch, Int32Array
from specserve.sources.base import SourceContext
from specserve.sources.trie import TrieSource
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.unsent import FULL_TOKENS
from specserve.trie.records import Record
from specserve.trie.token_trie import TokenTrie
from tests.peers.replay import NAMESPACE
from tests.peers.suffix_peer import VllmSuffix

BATCH, GROWTH, STEPS = 32, 2, 250
PROMPT_TOKENS, DRAFT_LEN = 400, 16
LEARNED_TOKENS_PER_S = 100_000
BURST_S = 0.1
LEARNING_S = 8.0
FORWARD_S = 0.005
"""Between two calls while another thread learns, where an engine computes its forward."""

Times = dict[str, list[float]]
"""Seconds of each call, by whose it was."""


def learn_all(trie: TokenTrie, texts: Sequence[Int32Array]) -> None:
    for number, text in enumerate(texts):
        trie.open(str(number))
        trie.append(str(number), text)
        trie.finish(str(number))


class Batch:
    """32 requests that grow; for both competitors the same.

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

    def new_tokens(self) -> list[list[int]]:
        """What the last step wrote; of the first one, a token."""
        count = GROWTH if self.lengths[0] > PROMPT_TOKENS + GROWTH else 1
        return [
            row[end - count : end].tolist()
            for row, end in zip(self.token_ids, self.lengths.tolist(), strict=True)
        ]


class Rivals:
    """The two memories, both taught the same texts.

    Args:
        texts: whole files.
        max_bytes: of our memory.
    """

    def __init__(self, texts: Sequence[Int32Array], max_bytes: int) -> None:
        self.memory = TrieMemory(max_bytes, [NAMESPACE])
        config = TrieConfig(kind="trie", max_draft_len=DRAFT_LEN, share="replica")
        self._proposer = TrieSource(config, self.memory, SourceContext())
        trie = self.memory.of(NAMESPACE)
        assert trie is not None
        self.trie = trie
        self._peer = VllmSuffix(DRAFT_LEN)
        learn_all(trie, texts)
        for number, text in enumerate(texts):
            self._peer.learn(str(number), text)

    def lookups(
        self, batch: Batch, times: Times, *, with_peer: bool = True, pause_s: float = 0.0
    ) -> None:
        """Drafts for a growing batch; the time of looking up alone."""
        trie, cache = self.trie, self._peer.cache
        for name, row in zip(batch.names, batch.token_ids, strict=True):
            trie.open(name)
            trie.append(name, row[:PROMPT_TOKENS], num_prompt_tokens=PROMPT_TOKENS)
            if with_peer:
                cache.start_request(name, row[:PROMPT_TOKENS])
        for step in range(STEPS):
            begins = batch.lengths.astype(np.int64)
            batch.grow()
            ends = batch.lengths.astype(np.int64)
            trie.append_rows(batch.names, batch.token_ids, begins, ends, begins)
            calls: dict[str, Callable[[], object]] = {"specserve": lambda: self._look_up(batch)}
            if with_peer:
                for row, name in enumerate(batch.names):
                    cache.add_active_response(name, batch.token_ids[row, begins[row] : ends[row]])
                calls["arctic"] = lambda: self._speculate(batch)
            _take_turns(calls, step, times)
            time.sleep(pause_s)
        for name in batch.names:
            trie.finish(name)
            if with_peer:
                cache.stop_request(name)

    def steps(
        self, batch: Batch, times: Times, *, with_peer: bool = True, pause_s: float = 0.0
    ) -> None:
        """All that the proposers do in a step; the first one, which takes the prompts, untimed."""
        for step in range(STEPS + 1):
            batch.grow()
            new = batch.new_tokens()
            calls: dict[str, Callable[[], object]] = {"specserve": lambda: self._propose(batch)}
            if with_peer:
                calls["arctic"] = lambda new=new: self._peer.propose(  # type: ignore[misc]
                    batch.names, batch.token_ids, batch.lengths, batch.num_prompt_tokens, new
                )
            _take_turns(calls, step, times if step else defaultdict(list))
            time.sleep(pause_s)
        self._proposer.forget(batch.names)
        if with_peer:
            for name in batch.names:
                self._peer.cache.stop_request(name)

    def _look_up(self, batch: Batch) -> None:
        self.trie.lookup(batch.token_ids, batch.lengths, batch.limits, batch.names)

    def _speculate(self, batch: Batch) -> None:
        settings, cache = self._peer.settings, self._peer.cache
        for row, name in enumerate(batch.names):
            end = batch.lengths[row]
            cache.speculate(
                name,
                batch.token_ids[row, end - cache.max_tree_depth : end],
                max_spec_tokens=self._peer.max_draft_len,
                max_spec_factor=settings["suffix_decoding_max_spec_factor"],
                min_token_prob=settings["suffix_decoding_min_token_prob"],
            )

    def _propose(self, batch: Batch) -> None:
        limits, num_prompt_tokens = batch.limits, batch.num_prompt_tokens
        self._proposer.propose(
            DraftBatch(batch.names, batch.token_ids, batch.lengths, num_prompt_tokens, limits)
        )


def _take_turns(calls: Mapping[str, Callable[[], object]], step: int, times: Times) -> None:
    """Each call once, another one first in every other step."""
    names = list(calls) if step % 2 else list(calls)[::-1]
    for name in names:
        begin = time.perf_counter()
        calls[name]()
        times[name].append(time.perf_counter() - begin)


def measure_lookup(
    rivals: Rivals, texts: Mapping[str, Sequence[Int32Array]], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """Microseconds a request of both, in turns."""
    rng = np.random.default_rng(seed)
    rows = []
    for kind, of_kind in texts.items():
        for call, run in (("lookup", rivals.lookups), ("step", rivals.steps)):
            all_times: Times = defaultdict(list)
            ratios = []
            for number in range(rounds + 1):
                times: Times = defaultdict(list)
                run(Batch(of_kind, f"{call}-{kind}-{number}", rng), times)
                if number:  # the first round warms up
                    ratios.append(median(times["specserve"]) / median(times["arctic"]))
                    for name, values in times.items():
                        all_times[name] += values
            ours, peer = (_in_us(all_times[name]) for name in ("specserve", "arctic"))
            rows.append(
                {
                    "text": kind,
                    "call": call,
                    **{f"specserve_{key}": value for key, value in ours.items()},
                    **{f"arctic_{key}": value for key, value in peer.items()},
                    "ratio": round(median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                }
            )
    return rows


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
    rivals: Rivals, texts: Mapping[str, Sequence[Int32Array]], stream: Stream, seed: int
) -> list[dict[str, Any]]:
    """The same calls of ours alone, while the stream is learned."""
    rng = np.random.default_rng(seed)
    calls: dict[tuple[str, str], Times] = {
        (call, kind): defaultdict(list) for call in ("lookup", "step") for kind in texts
    }
    stream.start()
    begin, number = time.perf_counter(), 0
    while time.perf_counter() - begin < LEARNING_S and stream.is_alive():
        for (call, kind), times in calls.items():
            run = rivals.lookups if call == "lookup" else rivals.steps
            batch = Batch(texts[kind], f"{call}-{kind}-beside-{number}", rng)
            run(batch, times, with_peer=False, pause_s=FORWARD_S)
        number += 1
    stream.stop()
    rate = round(stream.num_tokens / stream.seconds)
    return [
        {"text": kind, "call": call, **_in_us(times["specserve"]), "learned_tokens_per_s": rate}
        for (call, kind), times in calls.items()
    ]


def _in_us(seconds: Sequence[float]) -> dict[str, float]:
    values = np.array(seconds) / BATCH * 1e6
    return {
        "median": round(float(np.median(values)), 2),
        "p99": round(float(np.percentile(values, 99)), 2),
        "worst": round(float(values.max()), 1),
    }
