"""Prompt lookup beside vLLM's own: time a request and step, and how much of the drafts is accepted.

    python tests/peers/bench_ngram.py [--model configs/models/demo-base] [--steps 200]

Time: a batch of 16 requests of held-out standard-library code, each growing by 2 tokens a step;
median over the steps of one ``propose`` call, divided by 16, in the same process and run.
``chain`` is all that the engine's hook calls: outcomes, metrics, controls, search and gate.

Acceptance: replay. The text is known beforehand; a draft token is accepted if it is the next one
of the text. ``code``: the second half of a module, from its first half. ``rename``: a module's
start, then the same again with its commonest name replaced. Nothing is run by a model, so this
compares drafters alone.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from specserve.compare.corpus import load_modules
from specserve.compare.machine import circumstances
from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import NgramConfig
from specserve.core.types import DraftBatch, Int32Array, Outcome, RequestControls
from specserve.policy.chain import build_chain
from specserve.sources.ngram import INGEST_TOKENS_PER_STEP, NgramSource

BATCH = 16
CONTEXTS = (1_000, 4_000, 32_000, 100_000)
GROWTH = 2
WARM_UP_STEPS = 20

Propose = Callable[[Int32Array, Int32Array], Sequence[Sequence[int]]]
"""(token_ids [n, width], num_tokens [n]) -> drafts."""


@dataclass(frozen=True)
class Drafter:
    """One competitor, made anew for each measurement."""

    name: str
    make: Callable[[NgramConfig], Propose]


@dataclass(frozen=True)
class Replay:
    """What became of one drafter's drafts on one kind of text."""

    drafter: str
    text: str
    settings: str
    drafts_per_step: float
    accepted_per_draft: float
    tokens_per_step: float
    acceptance_rate: float


def settings(low: int, high: int, length: int, *, oldest: bool = False) -> NgramConfig:
    return NgramConfig(
        kind="ngram",
        max_draft_len=length,
        min_matching_ngram_size=low,
        max_matching_ngram_size=high,
        use_oldest=oldest,
    )


def batch_of(token_ids: Int32Array, num_tokens: Int32Array) -> DraftBatch:
    names = [f"request-{row}" for row in range(len(num_tokens))]
    limits = np.full(len(names), 128, np.int32)
    return DraftBatch(names, token_ids, num_tokens, num_tokens, limits)


def specserve_ngram(config: NgramConfig) -> Propose:
    proposer = NgramSource(config)

    def propose(token_ids: Int32Array, num_tokens: Int32Array) -> list[tuple[int, ...]]:
        return [draft.tokens for draft in proposer.propose(batch_of(token_ids, num_tokens))]

    return propose


def specserve_chain(config: NgramConfig) -> Propose:
    chain = build_chain([config], SpeculationMetrics())
    outcomes: list[Outcome] = []
    wishes = [RequestControls()] * BATCH

    def propose(token_ids: Int32Array, num_tokens: Int32Array) -> list[tuple[int, ...]]:
        batch = batch_of(token_ids, num_tokens)
        chain.observe_step(len(batch), sum(len(o.draft.tokens) for o in outcomes if o.draft), 0.01)
        drafts = chain.step(batch, outcomes, wishes)
        outcomes[:] = [
            Outcome(name, draft, min(1, len(draft.tokens)), (1, 2))
            for name, draft in zip(batch.request_ids, drafts, strict=True)
        ]
        return [draft.tokens for draft in drafts]

    return propose


def vllm_ngram(config: NgramConfig) -> Propose:
    # In here, since only the peer needs vLLM.
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer as VllmProposer

    peer = VllmProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=config.min_matching_ngram_size,
                prompt_lookup_max=config.max_matching_ngram_size,
                num_speculative_tokens=config.max_draft_len,
            ),
            model_config=SimpleNamespace(max_model_len=2 * CONTEXTS[-1]),
            scheduler_config=SimpleNamespace(max_num_seqs=BATCH),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )

    def propose(token_ids: Int32Array, num_tokens: Int32Array) -> Any:
        return peer.propose(config.max_draft_len, [[1]] * len(num_tokens), num_tokens, token_ids)

    return propose


NGRAM = Drafter("specserve ngram", specserve_ngram)
CHAIN = Drafter("specserve chain", specserve_chain)
VLLM = Drafter("vllm ngram", vllm_ngram)


def measure_latency(drafter: Drafter, stream: Int32Array, context: int, num_steps: int) -> float:
    """Microseconds a request and step, at ``BATCH`` requests of ``context`` tokens."""
    width = context + GROWTH * (WARM_UP_STEPS + num_steps)
    token_ids = np.stack([np.resize(np.roll(stream, -997 * row), width) for row in range(BATCH)])
    propose = drafter.make(settings(2, 4, 8))
    lengths = np.full(BATCH, context, np.int32)
    for _ in range(1 if drafter is VLLM else BATCH * context // INGEST_TOKENS_PER_STEP + 1):
        propose(token_ids, lengths)  # indexing the prompts is measured on its own
    times: list[float] = []
    for _ in range(WARM_UP_STEPS + num_steps):
        begin = time.perf_counter()
        propose(token_ids, lengths)
        times.append(time.perf_counter() - begin)
        lengths = lengths + GROWTH
    return median(times[WARM_UP_STEPS:]) / BATCH * 1e6


def measure_ingest(stream: Int32Array, context: int) -> tuple[float, float]:
    """(tokens a second, slowest step in ms) while prompts of ``context`` tokens are indexed."""
    token_ids = np.stack([np.resize(np.roll(stream, -997 * row), context) for row in range(BATCH)])
    batch = batch_of(token_ids, np.full(BATCH, context, np.int32))
    proposer = NgramSource(settings(2, 4, 8))
    times: list[float] = []
    while not times or proposer.num_unindexed_tokens(batch):
        begin = time.perf_counter()
        proposer.propose(batch)
        times.append(time.perf_counter() - begin)
    return BATCH * context / sum(times), 1e3 * max(times)


def replay_texts(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int], int]]:
    """(kind, tokens, where the replay begins) of each held-out module that is long enough."""
    for module in load_modules(held_out=True):
        ids = tokenizer.encode(module.text, add_special_tokens=False).ids
        if len(ids) >= 1_000:
            yield "code", ids[:1_500], len(ids[:1_500]) // 2
        if len(ids) >= 600:
            start = tokenizer.decode(ids[:600])
            [(name, _)] = Counter(re.findall(r"[a-z_]{4,}", start)).most_common(1)
            request = f"{start}\n\nRename {name} to renamed:\n\n"
            prompt = tokenizer.encode(request, add_special_tokens=False).ids
            answer = start.replace(name, "renamed")
            yield (
                "rename",
                prompt + tokenizer.encode(answer, add_special_tokens=False).ids,
                len(prompt),
            )


def replay(
    drafter: Drafter, config: NgramConfig, texts: Sequence[tuple[str, list[int], int]]
) -> Iterator[Replay]:
    """Acceptance on each kind of text, over all texts of the kind."""
    label = f"{config.min_matching_ngram_size}..{config.max_matching_ngram_size}"
    label += f" k={config.max_draft_len}{' oldest' if config.use_oldest else ''}"
    for kind in dict.fromkeys(kind for kind, _, _ in texts):
        num_steps = num_drafts = num_drafted = num_accepted = 0
        propose = drafter.make(config)
        for _, ids, begin in (text for text in texts if text[0] == kind):
            token_ids, position = np.array([ids], np.int32), begin
            while position < len(ids) - 1:
                draft = propose(token_ids, np.array([position], np.int32))[0]
                accepted = _num_equal(draft, ids[position:])
                num_steps += 1
                num_drafts += bool(draft)
                num_drafted += len(draft)
                num_accepted += accepted
                position += accepted + 1
            propose(token_ids[:, :1], np.array([1], np.int32))  # another text under the same id
        yield Replay(
            drafter=drafter.name,
            text=kind,
            settings=label,
            drafts_per_step=round(num_drafts / num_steps, 3),
            accepted_per_draft=round(num_accepted / max(num_drafts, 1), 3),
            tokens_per_step=round(1 + num_accepted / num_steps, 3),
            acceptance_rate=round(num_accepted / max(num_drafted, 1), 3),
        )


def _num_equal(draft: Sequence[int], text: Sequence[int]) -> int:
    count = 0
    while count < min(len(draft), len(text) - 1) and draft[count] == text[count]:
        count += 1
    return count


def print_latency(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"us a request and step, batch {BATCH}")
    table.add_column("context tokens", justify="right")
    for drafter in (NGRAM, CHAIN, VLLM):
        table.add_column(drafter.name, justify="right")
    table.add_column("indexing, Mtokens/s", justify="right")
    table.add_column("its slowest step, ms", justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" for value in row.values()))
    console.print(table)


def print_replay(console: Console, rows: Sequence[Replay]) -> None:
    table = Table(title="replay of held-out modules")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="left" if name == "drafter" else "right")
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints two tables and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("configs/models/demo-base"))
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(argv)
    console = Console()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    texts = list(replay_texts(tokenizer))
    modules = "\n".join(module.text for module in load_modules(held_out=True))
    stream = np.array(tokenizer.encode(modules, add_special_tokens=False).ids, np.int32)

    latency: list[dict[str, Any]] = []
    for context in CONTEXTS:
        row: dict[str, Any] = {"context": context}
        for drafter in (NGRAM, CHAIN, VLLM):
            num_steps = args.steps if drafter is not VLLM else max(args.steps // 10, 5)
            row[drafter.name] = round(measure_latency(drafter, stream, context, num_steps), 2)
        measure_ingest(stream, context)  # memory that a virtual machine never touched is slow
        rate, slowest_ms = measure_ingest(stream, context)
        latency.append(row | {"mtokens_per_s": round(rate / 1e6, 1), "ms": round(slowest_ms, 2)})
    print_latency(console, latency)

    replays: list[Replay] = []
    for low, high, length in ((2, 3, 5), (2, 4, 8), (3, 5, 5)):
        for drafter, oldest in ((VLLM, False), (NGRAM, False), (NGRAM, True)):
            replays += replay(drafter, settings(low, high, length, oldest=oldest), texts)
    print_replay(console, replays)
    result = {"latency_us": latency, "replay": [asdict(row) for row in replays]}
    print(json.dumps({"benchmark": "ngram", **circumstances(), **result}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
