"""Cost of drafting in one decoding step: ours and vLLM's own proposers, without an engine.

    python -m tests.peers drafting [--batches 1 8 32] [--texts agent,random] [--rounds 2]

Requests of about 1,000 tokens of Python code are replayed. A step accepts the draft tokens that are
next in the text, and writes one more token. Two steps are 5 ms apart. All sides take turns within a
step. The text of each grows by its own drafts. All runs in one thread.

Times are CPU times of the thread, since other processes may interrupt a step. ``interrupted`` is
the share of steps whose wall time was 1.2 times as long. The line of JSON has both times.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from specserve.compare.machine import circumstances
from specserve.core.config import AppConfig, parse
from specserve.core.types import Int32Array
from tests.peers.drafting_sides import (
    DRAFT_LEN,
    MAX_BYTES,
    VOCAB_SIZE,
    Drafts,
    Hook,
    Requests,
    Side,
    Trie,
    VllmNgram,
    VllmSuffixSide,
)
from tests.peers.sources import Sources
from tests.peers.suffix_peer import arctic
from tests.peers.tables import print_rows
from tests.peers.texts import num_same
from tests.peers.workload import edited

BATCHES = (1, 8, 32, 64, 128, 256)
TEXTS = ("agent", "code", "random")
WARM_UP_STEPS = 20
FORWARD_S = 0.005
EDITED_LINES = 0.1
"""Share of lines in an ``agent`` text that differ from the earlier text."""
INTERRUPTED = 1.2
"""Ratio of wall time to CPU time from which a step counts as interrupted."""
MATCH = (2, 4)
"""Shortest and longest match of vLLM's prompt lookup, in tokens."""


class Player:
    """One side's replay of a batch.

    Args:
        side: the competitor that drafts.
        requests: its own requests.
    """

    def __init__(self, side: Side, requests: Requests) -> None:
        self._side, self._requests = side, requests
        self._drafts: Drafts = [[] for _ in requests.req_ids]
        self.num_drafted = self.num_accepted = 0
        side.begin(requests)

    def step(self) -> tuple[float, float]:
        """Verifies the last drafts and asks for new ones.

        Returns:
            Seconds that the new drafts took, in CPU time and in wall time.
        """
        requests, sampled = self._requests, []
        for row, draft in enumerate(self._drafts):
            begin = int(requests.num_tokens_no_spec[row])
            following = requests.token_ids_cpu[row, begin : begin + len(draft) + 1].tolist()
            accepted = num_same(draft, following)
            sampled.append(following[: accepted + 1])
            requests.num_tokens_no_spec[row] += accepted + 1
            self.num_drafted += len(draft)
            self.num_accepted += accepted
        call = self._side.step(sampled, self._drafts)
        began, began_wall = time.thread_time(), time.perf_counter()
        self._drafts = call()
        return time.thread_time() - began, time.perf_counter() - began_wall


def sides(model: Path, batch: int, width: int) -> dict[str, Side]:
    """All competitors, which have learned nothing yet."""
    return {
        "asked": Hook(application(model, dynamic=False), 2 * width),
        "served": Hook(application(model, dynamic=True), 2 * width),
        "trie": Trie(batch),
        "trie, full": Trie(batch, is_full=True),
        "vllm ngram": VllmNgram(*MATCH, batch, 2 * width),
        "vllm suffix": VllmSuffixSide(),
    }


def application(model: Path, *, dynamic: bool) -> AppConfig:
    """A configuration with the sources that need no model."""
    each = {"max_draft_len": DRAFT_LEN, "dynamic": dynamic}
    trie = {"kind": "trie", "max_bytes": MAX_BYTES}
    return parse(
        {"model": {"path": str(model)}, "speculation": [{"kind": "ngram"} | each, trie | each]}
    )


def texts_of(
    kind: str, tokenizer: Tokenizer, batch: int, width: int, seed: int
) -> tuple[Int32Array, list[Int32Array]]:
    """(texts ``[batch, width]``, earlier texts)."""
    if kind == "random":
        rng = np.random.default_rng(seed)
        return rng.integers(0, VOCAB_SIZE, (batch, width), np.int32), []
    sources = Sources(tokenizer, seed)
    stream = np.concatenate(sources.texts(batch * width))[: batch * width]
    texts = stream.reshape(batch, width)
    if kind == "code":
        return texts, []
    rng_of_edits = random.Random(seed)
    before = [
        "".join(edited(text.splitlines(keepends=True), EDITED_LINES, rng_of_edits))
        for text in tokenizer.decode_batch(texts.tolist())
    ]
    return texts, list(sources.encoded(before))


def measure(
    model: Path, kind: str, batch: int, context: int, steps: int, seeds: Sequence[int]
) -> dict[str, Any]:
    """A row with the milliseconds of a step of each side.

    Args:
        model: folder of the tokenizer.
        kind: one of :data:`TEXTS`.
        batch: number of requests.
        context: prompt tokens of a request.
        steps: timed steps of a round.
        seeds: seed of the texts for each round.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    width = context + (DRAFT_LEN + 1) * (WARM_UP_STEPS + steps)
    seconds: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        texts, before = texts_of(kind, tokenizer, batch, width, seed)
        players = {}
        for name, side in sides(model, batch, width).items():
            for number, text in enumerate(before):
                side.learn(f"before-{number}", text)
            names = [f"request-{row}" for row in range(batch)]
            players[name] = Player(side, Requests(names, texts, context))
        order = list(players)
        for number in range(WARM_UP_STEPS + steps):
            for name in order:
                took = players[name].step()
                if number >= WARM_UP_STEPS:
                    seconds.setdefault(name, []).append(took)
            order = order[1:] + order[:1]
            time.sleep(FORWARD_S)
    total = batch * (WARM_UP_STEPS + steps)
    row: dict[str, Any] = {"text": kind, "batch": batch}
    all_cpu, all_wall = np.array([each for found in seconds.values() for each in found]).T
    row["interrupted"] = round(float((all_wall > INTERRUPTED * all_cpu).mean()), 2)
    for name, found in seconds.items():
        of_last = players[name]
        cpu, wall = np.array(found).T
        row[name] = {
            "median_ms": round(1e3 * float(np.median(cpu)), 3),
            "p99_ms": round(1e3 * float(np.percentile(cpu, 99)), 3),
            "median_wall_ms": round(1e3 * float(np.median(wall)), 3),
            "drafted_per_step": round(of_last.num_drafted / total, 2),
            "accepted_per_step": round(of_last.num_accepted / total, 2),
        }
    return row


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """Cells of a row in the table."""
    shown = {
        name: f"{value['median_ms']:.3f} ({value['p99_ms']:.2f})"
        for name, value in row.items()
        if isinstance(value, dict)
    }
    per_request = [1e3 * row[name]["median_ms"] / row["batch"] for name in ("trie", "trie, full")]
    asked = row["asked"]
    return {
        "text": row["text"],
        "batch": row["batch"],
        **shown,
        "trie and full, us a request": ", ".join(f"{each:.2f}" for each in per_request),
        "interrupted": row["interrupted"],
        "drafted, accepted of asked": f"{asked['drafted_per_step']}, {asked['accepted_per_step']}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("configs/models/demo-base"))
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--context", type=int, default=1000, help="prompt tokens of a request")
    parser.add_argument("--steps", type=int, default=60, help="timed, of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    kinds = args.texts.split(",")
    if unknown := set(kinds) - set(TEXTS):
        parser.error(f"--texts: {', '.join(sorted(unknown))}: known are {', '.join(TEXTS)}")
    arctic()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    places = [(kind, batch) for kind in kinds for batch in args.batches]
    seeds = range(args.seed, args.seed + args.rounds)
    rows = [
        measure(args.model, kind, batch, args.context, args.steps, seeds)
        for kind, batch in track(places, "measuring")
    ]
    print_rows(Console(width=160), "ms a step: median (99th percentile)", list(map(cells, rows)))
    options = {key: value for key, value in vars(args).items() if key != "model"}
    print(
        json.dumps({"benchmark": "drafting", **circumstances(), "options": options, "rows": rows})
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
