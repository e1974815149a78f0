"""The draft memory alone, compared with Arctic Inference's suffix trees as vLLM calls them.

    python -m tests.peers trie [--seed 0] [--rounds 5]

Text: Python files of the installed packages, in an order chosen by the seed. ``known`` text was
learned, ``new`` text was not. The two take turns in one process. A ratio is taken within a round,
and the tables have its median. The peer needs ``pip install --no-deps arctic-inference==0.1.1``.
``drafting`` measures the time of both in a step.

Insert: whole files into one memory. vLLM puts an output into two of the peer's trees. One is timed.
While learning: a whole step of the source, which learns 2 tokens of each of 32 requests, with 5 ms
between the calls. Another thread teaches the memory other replicas' text in bursts every 0.1 s,
like the link to the store.
Replay: see replay.py. ``again``: texts of earlier requests. ``renamed``: the same texts with their
most frequent name replaced.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from specserve.compare.machine import circumstances
from specserve.core.types import Int32Array
from specserve.trie.memory import TrieMemory
from specserve.trie.token_trie import TokenTrie
from tests.peers.replay import NAMESPACE, Drafter, SuffixDrafter, TrieDrafter, replay
from tests.peers.sources import Sources
from tests.peers.suffix_peer import arctic
from tests.peers.tables import print_rows
from tests.peers.taught_memory import (
    BATCH,
    LEARNED_TOKENS_PER_S,
    LEARNING_S,
    Stream,
    TaughtMemory,
    learn_all,
    measure_while_learning,
)
from tests.peers.texts import Text

DRAFT_LENS = (16, 32)
BYTES_PER_TOKEN = 68
"""A memory with this many bytes per token holds a whole text."""

REPLAYED, REPLAYED_TOKENS, REPLAYED_PROMPT_TOKENS = 40, 700, 300


def insert_ours(texts: Sequence[Int32Array], max_bytes: int) -> tuple[float, TokenTrie]:
    """(seconds, the memory)."""
    trie = TokenTrie(max_bytes)
    begin = time.perf_counter()
    learn_all(trie, texts)
    return time.perf_counter() - begin, trie


def insert_peer(texts: Sequence[Int32Array], depth: int) -> tuple[float, Any]:
    """(seconds, the tree)."""
    tree = arctic().cache.SuffixTree(depth)
    begin = time.perf_counter()
    for number, text in enumerate(texts):
        tree.extend_ndarray(number, text)
    return time.perf_counter() - begin, tree


def measure_insert(texts: Sequence[Int32Array], rounds: int) -> list[dict[str, Any]]:
    """Tokens per second, and bytes per token: by each side's own count, and of the process."""
    size = sum(map(len, texts))
    room = BYTES_PER_TOKEN * size
    memories: dict[str, Callable[[], tuple[float, Any]]] = {
        "specserve": lambda: insert_ours(texts, room),
        "specserve, evicting": lambda: insert_ours(texts, room // 4),
        "arctic, depth 24": lambda: insert_peer(texts, 24),
        "arctic, depth 64": lambda: insert_peer(texts, 64),
    }
    insert_ours(texts[:1], 1 << 20)  # compiles
    times: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, insert in memories.items():
            before = _process_bytes()
            seconds, memory = insert()
            times[name].append(seconds)
            is_ours = isinstance(memory, TokenTrie)
            held = memory.num_tokens if is_ours else size
            told = memory.num_bytes if is_ours else memory.estimate_memory()
            sizes[name] = {
                "held_tokens": held,
                "bytes_per_token": round(told / held, 1),
                "process_bytes_per_token": round((_process_bytes() - before) / held, 1),
            }
            del memory
    return [
        {
            "memory": name,
            "mtokens_per_s": round(size / median(each) / 1e6, 2),
            "ratio": round(_ratio(times["arctic, depth 24"], each), 2),
            **sizes[name],
        }
        for name, each in times.items()
    ]


def _process_bytes() -> int:
    """Memory of the process, after freed memory was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class Contender:
    """One row of the replay."""

    name: str
    make: Callable[[], Drafter]


def contenders(max_bytes: int) -> list[Contender]:
    found: list[Contender] = []
    for k in DRAFT_LENS:
        found += [
            Contender(f"trie, k={k}", partial(new_trie, k, max_bytes)),
            Contender(f"vLLM suffix, k={k}", partial(SuffixDrafter, k)),
        ]
    return found


def new_trie(max_draft_len: int, max_bytes: int) -> TrieDrafter:
    return TrieDrafter(TrieMemory(max_bytes, [NAMESPACE]), max_draft_len)


def measure_replay(
    known: Sequence[Int32Array],
    pairs: Sequence[tuple[Int32Array, Int32Array]],
    max_bytes: int,
) -> list[dict[str, Any]]:
    """Replays the new texts, the same texts again, and then with a name replaced."""
    passes = {
        "new": [text for text, _ in pairs],
        "again": [text for text, _ in pairs],
        "renamed": [text for _, text in pairs],
    }
    rows = []
    for contender in track(contenders(max_bytes), "replay"):
        drafter = contender.make()
        for number, text in enumerate(known):
            drafter.learn(f"known-{number}", text)
        for kind, texts in passes.items():
            requests = [
                Text(f"{kind}-{number}", text, REPLAYED_PROMPT_TOKENS)
                for number, text in enumerate(texts)
            ]
            tally = replay(drafter, requests)
            rows.append({"text": kind, "drafter": contender.name, **tally.as_row()})
    return sorted(rows, key=lambda row: list(passes).index(str(row["text"])))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints three tables and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("configs/models/demo-base"))
    parser.add_argument("--tokens", type=int, default=1_000_000, help="text learned beforehand")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="chooses the files")
    args = parser.parse_args(argv)
    arctic()
    console, made_with = Console(), circumstances()
    sources = Sources(Tokenizer.from_file(str(args.model / "tokenizer.json")), args.seed)
    known = sources.texts(args.tokens)
    texts = {"known": known, "new": sources.texts(args.tokens // 4)}
    others = sources.texts(round(1.5 * LEARNING_S * LEARNED_TOKENS_PER_S))
    pairs = sources.renamed(REPLAYED, REPLAYED_TOKENS)
    max_bytes = 2 * BYTES_PER_TOKEN * args.tokens

    insert = measure_insert(known, args.rounds)
    print_rows(console, f"insert, {sum(map(len, known)):,} tokens", insert)
    memory = TaughtMemory(known, max_bytes)
    learning = measure_while_learning(memory, texts, Stream(memory.memory, others), args.seed)
    print_rows(console, f"us a request, batch {BATCH}, while another thread learns", learning)
    del memory
    replayed = measure_replay(known, pairs, max_bytes)
    print_rows(console, "replay, no gate", replayed)
    options = {"seed": args.seed, "rounds": args.rounds, "tokens": args.tokens}
    result = {"insert": insert, "while_learning": learning, "replay": replayed}
    print(json.dumps({"benchmark": "trie", **made_with, "options": options, **result}))
    return 0


def _ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
