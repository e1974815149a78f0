"""A model that drafts, beside vLLM's own way to run it: what both draft at the same place.

    python -m tests.peers agreement

One request at a time, greedy, on both sides the same target and kernels. A place is a text and how
far it was written; drafts are compared where both sides have one and wrote the same text before.
vLLM drafts at places where ours does not: behind a prompt that is yet to be read, and where fewer
tokens may follow than a draft has. So acceptance over all drafts differs, though the drafts do not.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specserve.bench.engine_process import engine_environment
from specserve.bench.machine import circumstances
from specserve.bench.prompts import load_prompts, load_tokenizer
from specserve.engine.generation import Job, Sampling
from specserve.engine.methods import parse_method
from tests.peers.bench_drafters import (
    DRAFT_MODEL,
    blurred_copy,
    draft_model_contenders,
    mtp_contenders,
)
from tests.peers.bench_engine import Contender, measured_config
from tests.peers.tables import print_rows

Tokens = tuple[int, ...]


@dataclass
class Side:
    """What one engine wrote and drafted.

    Attributes:
        texts: output tokens by prompt.
        drafts: by prompt and number of output tokens before.
    """

    texts: dict[Tokens, Tokens] = field(default_factory=dict)
    drafts: dict[tuple[Tokens, int], Tokens] = field(default_factory=dict)


def run_side(contender: Contender, jobs: Sequence[Job]) -> Side:
    """Runs the jobs in a process of their own, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "given"), Path(folder, "found")
        given.write_bytes(pickle.dumps((contender, list(jobs))))
        command = [sys.executable, "-m", "tests.peers.bench_agreement", str(given), str(found)]
        environment = engine_environment(contender.config)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{contender.name}: {done.stderr[-2000:]}")
        return Side(*pickle.loads(found.read_bytes()))


def compare(ours: Side, theirs: Side) -> dict[str, Any]:
    """How many drafts are the same, and how many were right, where both sides have one."""
    pairs = list(_common(ours, theirs))
    row: dict[str, Any] = {"places": len(pairs)}
    for position in range(1, 1 + max((len(draft) for draft, _, _ in pairs), default=0)):
        # What follows a wrong token may be anything.
        alike = [
            (one, other, text)
            for one, other, text in pairs
            if min(len(one), len(other), len(text)) >= position
        ]
        same = [one[:position] == other[:position] for one, other, _ in alike]
        row[f"same_{position}"] = round(sum(same) / len(alike), 3)
        for side, which in (("ours", 0), ("vllm", 1)):
            right = [pair[which][:position] == pair[2][:position] for pair in alike]
            row[f"{side}_right_{position}"] = round(sum(right) / len(alike), 3)
    return row


def _common(ours: Side, theirs: Side) -> Iterator[tuple[Tokens, Tokens, Tokens]]:
    """Both drafts of a place, and what was written there."""
    for (prompt, begin), draft in ours.drafts.items():
        text, other = ours.texts[prompt], theirs.drafts.get((prompt, begin), ())
        if draft and other and text[:begin] == theirs.texts[prompt][:begin]:
            yield draft, other, text[begin:]


def measure(
    ours: Contender, theirs: Contender, jobs: dict[str, list[Job]]
) -> Iterator[dict[str, Any]]:
    """A row for each set.

    Args:
        ours: drafts by a drafter.
        theirs: drafts in vLLM's engine, with the same model.
        jobs: by the name of their set; no prompt twice.
    """
    of_all = [job for of_set in jobs.values() for job in of_set]
    sides = [run_side(each, of_all) for each in (ours, theirs)]
    for name, of_set in jobs.items():
        prompts = {job.prompt_token_ids for job in of_set}
        narrowed = [replace(side, drafts=_of(side, prompts)) for side in sides]
        yield {"source": ours.name, "set": name, **compare(*narrowed)}


def _of(side: Side, prompts: Collection[Tokens]) -> dict[tuple[Tokens, int], Tokens]:
    return {place: draft for place, draft in side.drafts.items() if place[0] in prompts}


def _watch(given: Path, found: Path) -> None:
    """The child: runs the jobs and writes down what the scheduler is told of drafts."""
    from specserve.engine.offline import OfflineEngine

    contender, jobs = pickle.loads(given.read_bytes())
    method = parse_method(contender.method, contender.config)
    method = replace(method, on_our_kernels=contender.on_our_kernels)
    engine = OfflineEngine(contender.config, method)
    scheduler = engine._engine.engine_core.engine_core.scheduler
    side, update = Side(), scheduler.update_draft_token_ids

    def note(drafts: Any) -> None:
        for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if (request := scheduler.requests.get(request_id)) is not None:
                place = tuple(request.prompt_token_ids), request.num_output_tokens
                side.drafts[place] = tuple(tokens)
        update(drafts)

    scheduler.update_draft_token_ids = note
    result = engine.run(jobs, 1, lambda *_: None)
    engine.close()
    for job, completion in zip(jobs, result.completions, strict=True):
        side.texts[job.prompt_token_ids] = tuple(completion.token_ids)
    found.write_bytes(pickle.dumps((side.texts, side.drafts)))


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
    config = measured_config(args.config)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.revision)
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
        blurred_copy(Path(DRAFT_MODEL), target, args.seed)
        _, *mtp = mtp_contenders(config, args.num_draft_tokens)
        _, *draft_model = draft_model_contenders(config, target, args.num_draft_tokens)
        rows = [row for pair in (mtp, draft_model) for row in measure(pair[0], pair[1], jobs)]
    print_rows(Console(width=160), "drafts at the same places", rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "agreement", **circumstances(), **document}))
    return 0


if __name__ == "__main__":
    _watch(*map(Path, sys.argv[1:]))
