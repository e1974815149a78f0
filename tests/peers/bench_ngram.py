"""Prompt lookup beside vLLM's own: how much of the drafts is accepted.

    python -m tests.peers ngram [--model configs/models/demo-base]

Replay. The text is known beforehand; a draft token is accepted if it is the next one of the text.
``code``: the second half of a module, from its first half. ``rename``: a module's start, then the
same again with its commonest name replaced. Nothing is run by a model, so this compares drafters
alone. What drafting costs is measured by ``drafting``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from specserve.compare.corpus import load_modules
from specserve.compare.machine import circumstances
from specserve.core.source_config import NgramConfig
from specserve.core.types import DraftBatch, Int32Array
from specserve.sources.ngram import NgramProposer
from tests.peers.tables import print_rows

MAX_MODEL_LEN = 4096

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
    proposer = NgramProposer(config)

    def propose(token_ids: Int32Array, num_tokens: Int32Array) -> list[tuple[int, ...]]:
        return [draft.tokens for draft in proposer.propose(batch_of(token_ids, num_tokens))]

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
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )

    def propose(token_ids: Int32Array, num_tokens: Int32Array) -> Any:
        return peer.propose(config.max_draft_len, [[1]] * len(num_tokens), num_tokens, token_ids)

    return propose


NGRAM = Drafter("specserve ngram", specserve_ngram)
VLLM = Drafter("vllm ngram", vllm_ngram)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("configs/models/demo-base"))
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    texts = list(replay_texts(tokenizer))
    rows: list[dict[str, Any]] = []
    for low, high, length in ((2, 3, 5), (2, 4, 8), (3, 5, 5)):
        for drafter, oldest in ((VLLM, False), (NGRAM, False), (NGRAM, True)):
            config = settings(low, high, length, oldest=oldest)
            rows += map(asdict, replay(drafter, config, texts))
    print_rows(Console(), "replay of held-out modules", rows)
    print(json.dumps({"benchmark": "ngram", **circumstances(), "replay": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
