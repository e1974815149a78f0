"""Drafts of the same model at the same place: our drafter compared with vLLM's engine.

    python -m tests.peers agreement

Both sides run one greedy request at a time with the same target and kernels. A place is a prompt
and a number of output tokens. Drafts are compared at places where both sides have a draft and the
same text before it. Drafts that only one side has are counted in rows of their own. There are such
drafts because a step begins where the last draft was rejected, so after one different draft the
places differ. Our engine also does not wait for drafts after a long prompt. A draft token is right
if its own engine wrote it next.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specserve.compare.engine_process import engine_environment
from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer, load_prompts
from specserve.engine.generation import Job, Sampling
from tests.peers.bench_drafters import (
    DRAFT_MODEL,
    blurred_copy,
    draft_model_contenders,
    mtp_contenders,
)
from tests.peers.bench_engine import Contender, measured_config
from tests.peers.tables import print_rows
from tests.peers.texts import num_same

PATIENCE_S = 60.0
"""Time limit for a draft. A late draft would not be counted."""

Tokens = tuple[int, ...]
Place = tuple[Tokens, int]
"""A prompt, and the number of output tokens after it."""


@dataclass(frozen=True)
class Side:
    """Output and drafts of one engine.

    Attributes:
        texts: output tokens by prompt.
        drafts: drafts by place.
    """

    texts: dict[Tokens, Tokens]
    drafts: dict[Place, Tokens]

    def within(self, prompts: set[Tokens]) -> Side:
        """The part of it for these prompts."""
        drafts = {place: draft for place, draft in self.drafts.items() if place[0] in prompts}
        return Side(self.texts, drafts)

    def num_right(self, place: Place) -> int:
        """Number of draft tokens that the text continues with."""
        prompt, begin = place
        return num_same(self.drafts[place], self.texts[prompt][begin:])

    def known(self, place: Place) -> int:
        """Number of draft tokens that can be judged before the text ends."""
        prompt, begin = place
        return min(len(self.drafts[place]), len(self.texts[prompt]) - begin)


def run_side(contender: Contender, jobs: Sequence[Job]) -> Side:
    """Runs the jobs one after the other in a separate process."""
    patient = tuple(
        source.model_copy(update={"timeout_s": PATIENCE_S})
        for source in contender.config.speculation
    )
    config = contender.config.model_copy(update={"speculation": patient})
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "given"), Path(folder, "found")
        given.write_bytes(pickle.dumps((replace(contender, config=config), list(jobs))))
        command = [sys.executable, "-m", "tests.peers.watched_engine", str(given), str(found)]
        environment = engine_environment(config)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr[-2000:]
            raise RuntimeError(f"{contender.name}: exit code {done.returncode}: {said}")
        return Side(*pickle.loads(found.read_bytes()))


def compare(ours: Side, theirs: Side, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yields a row for places of both sides, and two for each side alone.

    Args:
        ours: the side of our drafter.
        theirs: the side of vLLM.
        num_tokens: number of draft positions in a row.
    """
    both = {
        (prompt, begin)
        for prompt, begin in ours.drafts.keys() & theirs.drafts.keys()
        if ours.texts[prompt][:begin] == theirs.texts[prompt][:begin]
    }
    yield {"drafts of": "both", **_row(both, ours, theirs, num_tokens)}
    for name, one, other in (("ours", ours, None), ("vLLM", None, theirs)):
        side = one or other
        assert side is not None
        alone = side.drafts.keys() - both
        # The step that ends the prompt writes the first token. The first draft comes after it.
        first = {place for place in alone if place[1] == 1}
        for where, places in (("behind a prompt", first), ("elsewhere", alone - first)):
            yield {"drafts of": f"{name} alone, {where}", **_row(places, one, other, num_tokens)}


def _row(
    places: set[Place], ours: Side | None, theirs: Side | None, num_tokens: int
) -> dict[str, Any]:
    """Shares by position; empty without data."""
    row: dict[str, Any] = {"places": len(places)}
    positions = range(1, num_tokens + 1)
    if ours and theirs:
        pairs = [(ours.drafts[place], theirs.drafts[place]) for place in places]
    else:
        pairs = []
    for end in positions:
        row[f"same_{end}"] = _share(
            [a[:end] == b[:end] for a, b in pairs if len(a) >= end <= len(b)]
        )
    for name, side in (("ours", ours), ("vllm", theirs)):
        for end in positions:
            known = [place for place in places if side.known(place) >= end] if side else []
            right = [side.num_right(place) >= end for place in known] if side else []
            row[f"{name}_right_{end}"] = _share(right)
    return row


def _share(those: Sequence[bool]) -> float | str:
    return round(sum(those) / len(those), 3) if those else ""


def measure(
    ours: Contender, theirs: Contender, jobs: dict[str, list[Job]], num_tokens: int
) -> Iterator[dict[str, Any]]:
    """The rows of :func:`compare` for each set.

    Args:
        ours: the contender with our drafter.
        theirs: the contender that drafts in vLLM's engine with the same model.
        jobs: jobs by the name of their set, without equal prompts.
        num_tokens: draft tokens of a step.
    """
    of_all = [job for of_set in jobs.values() for job in of_set]
    assert len({job.prompt_token_ids for job in of_all}) == len(of_all)
    one, other = (run_side(each, of_all) for each in (ours, theirs))
    for name, of_set in jobs.items():
        prompts = {job.prompt_token_ids for job in of_set}
        for row in compare(one.within(prompts), other.within(prompts), num_tokens):
            yield {"source": ours.name, "set": name, **row}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/mtp.yaml"))
    parser.add_argument("--sets", default="code,chat", help="prompt sets")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config, num_tokens = measured_config(args.config), args.num_draft_tokens
    tokenizer = configured_tokenizer(config)
    sampling = Sampling(max_tokens=args.max_tokens)
    jobs = {
        name: [
            Job(prompt.token_ids, sampling)
            for prompt in load_prompts(
                name, tokenizer, num_prompts=args.num_prompts, seed=args.seed
            )
        ]
        for name in args.sets.split(",")
    }
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        blurred_copy(DRAFT_MODEL, target, args.seed)
        rows: list[dict[str, Any]] = []
        for _, ours, theirs, *_ in (
            mtp_contenders(config, num_tokens),
            draft_model_contenders(config, DRAFT_MODEL, target, num_tokens),
        ):
            rows += measure(ours, theirs, jobs, num_tokens)
    print_rows(Console(width=200), "drafts at the same places", rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "agreement", **circumstances(), **document}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
