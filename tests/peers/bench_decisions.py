"""Speed of sources and draft plans on recorded answers, without timing noise.

    python -m tests.peers decisions [--traffic never-seen,agent] [--clients 1 8]
        [--num-requests 96] [--extra-layers 12]

The engine answers the requests once. The benchmark records its answers, and the step costs by the
chain's own cost model. Then each contender drafts for these answers. A draft token is right if the
answer has it, and a step takes the time of the cost model. Prompts and calls of sources take no
time. So the ratios cover decoding only, with contenders that cost nothing.

``all`` has the configuration's sources without those in other processes. ``suffix`` is vLLM's
suffix decoding with 16 tokens. ``perfect`` has the sources of ``all`` and knows the answer. It
sends the right part of the best draft, so no choice among these drafts can be better.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from rich.console import Console

from specserve.compare.machine import circumstances
from specserve.compare.prompts import Tokenizer, configured_tokenizer
from specserve.core.config import AppConfig
from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import DrafterConfig, SourceConfig
from specserve.core.types import DraftBatch, Int32Array, RequestControls
from specserve.engine.generation import Job, Sampling
from specserve.serve.config_file import read
from tests.peers.in_process import relaunched, worker_of
from tests.peers.inflate import inflated
from tests.peers.suffix_peer import VllmSuffix, arctic
from tests.peers.tables import print_rows
from tests.peers.texts import Tally, Text, num_same
from tests.peers.workload import TRAFFIC, Request, Workload, known_traffic

# Modules that load vLLM are imported where they are used, after the environment is set.

SUFFIX_TOKENS = 16


class StepCosts(NamedTuple):
    """Seconds of a step without drafts, of a step with drafts, and of each draft token."""

    plain: float
    base: float
    slope: float

    def seconds(self, num_draft_tokens: int) -> float:
        """Seconds of a step."""
        if not num_draft_tokens:
            return self.plain
        return self.base + self.slope * num_draft_tokens


class Contender(Protocol):
    """Drafts for a batch of requests by row."""

    def open(self, row: int, text: Text) -> None:
        """A request begins."""
        ...

    def draft(self, batch: DraftBatch, num_new: Int32Array) -> list[list[int]]:
        """A draft for each row. The last ``num_new`` tokens of its text are new."""
        ...

    def learn(self, num_draft_tokens: int, seconds: float) -> None:
        """Reports the time of the step that verified these drafts."""
        ...

    def close(self, batch: DraftBatch) -> None:
        """These requests have ended."""
        ...


class Ours:
    """A chain of the sources, driven like in an engine's hook."""

    def __init__(self, sources: Sequence[SourceConfig], num_rows: int) -> None:
        from specserve.policy.chain import build_chain
        from specserve.sources.base import SourceContext

        metrics = SpeculationMetrics(tuple(each.kind for each in sources))
        context = SourceContext(num_slots=num_rows)
        self.chain = build_chain(sources, metrics, context, clock=lambda: 0.0)
        self._num_rows = num_rows
        self._num_sent: Int32Array = np.zeros(num_rows, np.int32)

    def open(self, row: int, text: Text) -> None:
        """See :class:`Contender`."""
        max_output = len(text.tokens) - text.num_prompt_tokens
        self.chain.open(row, RequestControls(), max_output)

    def draft(self, batch: DraftBatch, num_new: Int32Array) -> list[list[int]]:
        """See :class:`Contender`."""
        self.chain.observe(batch, num_new, self._num_sent)
        drafts = self.chain.step(batch)
        self._num_sent[:] = [len(draft) for draft in drafts]
        return drafts

    def learn(self, num_draft_tokens: int, seconds: float) -> None:
        """See :class:`Contender`."""
        self.chain.cost.observe(self._num_rows, num_draft_tokens, seconds)

    def close(self, batch: DraftBatch) -> None:
        """See :class:`Contender`."""
        self.chain.finish(batch)
        self.chain.close(batch.slots)
        self._num_sent[batch.slots] = 0


class Perfect(Ours):
    """The same sources, with drafts chosen and cut by the known answers."""

    def __init__(self, sources: Sequence[SourceConfig], num_rows: int, costs: StepCosts) -> None:
        super().__init__(sources, num_rows)
        self._answers: list[Int32Array] = [np.zeros(0, np.int32)] * num_rows
        self._costs = costs

    def open(self, row: int, text: Text) -> None:
        """See :class:`Contender`."""
        super().open(row, text)
        self._answers[row] = text.tokens

    def draft(self, batch: DraftBatch, num_new: Int32Array) -> list[list[int]]:
        """See :class:`Contender`."""
        super().draft(batch, num_new)
        offers = self.chain._acceptance.state.offers
        drafts = []
        for row, length in enumerate(batch.num_tokens.tolist()):
            rest = self._answers[row][length:-1]  # the step adds one more token
            best: list[int] = []
            for tokens, size in zip(offers.tokens[:, row], offers.lengths[:, row], strict=True):
                num_right = num_same(tokens[:size], rest)
                if num_right > len(best):
                    best = tokens[:num_right].tolist()
            drafts.append(best)
        total, num_rows = sum(map(len, drafts)), len(drafts)
        if (num_rows + total) * self._costs.plain < num_rows * self._costs.seconds(total):
            drafts = [[] for _ in drafts]
        self._num_sent[:] = [len(draft) for draft in drafts]
        return drafts


class Suffix:
    """vLLM's suffix decoding."""

    def __init__(self, num_rows: int) -> None:
        self._peer = VllmSuffix(SUFFIX_TOKENS)
        self._names = [""] * num_rows

    def open(self, row: int, text: Text) -> None:
        """See :class:`Contender`."""
        self._names[row] = text.name

    def draft(self, batch: DraftBatch, num_new: Int32Array) -> list[list[int]]:
        """See :class:`Contender`."""
        ends = batch.num_tokens
        new = [
            tokens[end - count : end].tolist()
            for tokens, end, count in zip(batch.token_ids, ends, num_new, strict=True)
        ]
        return self._peer.propose(
            list(self._names), batch.token_ids, ends, batch.num_prompt_tokens, new
        )

    def learn(self, num_draft_tokens: int, seconds: float) -> None:
        """Does nothing: its drafts do not depend on costs."""

    def close(self, batch: DraftBatch) -> None:
        """Does nothing: a request that is not in the next batch has ended."""


def replay(
    contender: Contender, answers: Sequence[Text], num_rows: int, costs: StepCosts
) -> dict[str, float]:
    """Drafts for answers, ``num_rows`` at a time, until fewer answers are left.

    Returns:
        ``tokens_per_second``, ``steps``, ``drafts``, ``drafted`` and ``accepted`` tokens.
    """
    waiting = list(answers)
    rows = [waiting.pop(0) for _ in range(num_rows)]
    longest = max(len(text.tokens) for text in answers)
    batch = DraftBatch(
        np.arange(num_rows),
        np.zeros((num_rows, longest), np.int32),
        np.zeros(num_rows, np.int32),
        np.zeros(num_rows, np.int32),
    )
    num_new: Int32Array = np.ones(num_rows, np.int32)

    def begin(row: int) -> None:
        text = rows[row]
        batch.token_ids[row, : len(text.tokens)] = text.tokens
        batch.num_tokens[row] = text.num_prompt_tokens + 1  # the prompt's step writes one
        batch.num_prompt_tokens[row] = text.num_prompt_tokens
        num_new[row] = 1
        contender.open(row, text)

    for row in range(num_rows):
        begin(row)
    seconds, num_tokens = 0.0, 0
    tally = Tally()
    while True:
        drafts = contender.draft(batch, num_new)
        total = sum(map(len, drafts))
        step_s = costs.seconds(total)
        contender.learn(total, step_s)
        seconds += step_s
        tally.steps += 1
        tally.drafts += sum(map(bool, drafts))
        tally.drafted += total
        for row, draft in enumerate(drafts):
            rest = rows[row].tokens[batch.num_tokens[row] :]
            num_right = num_same(draft, rest[:-1])
            num_new[row] = num_right + 1
            tally.accepted += num_right
        batch.num_tokens[:] += num_new
        num_tokens += int(num_new.sum())
        ended = [row for row in range(num_rows) if batch.num_tokens[row] == len(rows[row].tokens)]
        if ended:
            contender.close(_rows_of(batch, ended))
            if len(waiting) < len(ended):
                return {"tokens_per_second": num_tokens / seconds, **asdict(tally)}
            for row in ended:
                rows[row] = waiting.pop(0)
                begin(row)


def _rows_of(batch: DraftBatch, rows: Sequence[int]) -> DraftBatch:
    return DraftBatch(
        batch.slots[rows],
        batch.token_ids[rows],
        batch.num_tokens[rows],
        batch.num_prompt_tokens[rows],
    )


class Recorder:
    """An engine with the local sources that records answers and step costs."""

    def __init__(self, config: AppConfig, kinds: Sequence[str]) -> None:
        from specserve.engine.methods import parse_method
        from specserve.engine.offline import OfflineEngine

        self._engine = OfflineEngine(config, parse_method("+".join(kinds), config))

    def record(self, jobs: Sequence[Job], num_rows: int) -> tuple[list[Text], StepCosts]:
        """The answers to jobs, ``num_rows`` at a time, and the costs of a step of that size."""
        from specserve.policy.cost import costs_of

        run = self._engine.run(jobs, num_rows, lambda *_: None)
        chain = worker_of(self._engine).model_runner.drafter._chain
        answers = [
            Text(
                f"{number}",
                np.array((*job.prompt_token_ids, *completion.token_ids), np.int32),
                len(job.prompt_token_ids),
            )
            for number, (job, completion) in enumerate(zip(jobs, run.completions, strict=True))
        ]
        return answers, StepCosts(*costs_of(chain.cost.lines, num_rows))

    def close(self) -> None:
        """Stops the engine."""
        self._engine.close()


def compare(
    sources: Sequence[SourceConfig], answers: Sequence[Text], num_rows: int, costs: StepCosts
) -> list[dict[str, Any]]:
    """A row for each contender, with its speed relative to suffix decoding."""
    contenders: dict[str, Contender] = {
        "suffix": Suffix(num_rows),
        "all": Ours(sources, num_rows),
        "perfect": Perfect(sources, num_rows, costs),
    }
    results = {
        name: replay(contender, answers, num_rows, costs) for name, contender in contenders.items()
    }
    of_suffix = results["suffix"]["tokens_per_second"]
    return [
        {
            "contender": name,
            "x_suffix": round(result["tokens_per_second"] / of_suffix, 3),
            **{key: round(value) for key, value in result.items()},
        }
        for name, result in results.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--traffic", default="never-seen,agent", help=", ".join(TRAFFIC))
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--num-requests", type=int, default=96)
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    traffic = known_traffic(parser, args.traffic)
    if not 0 < min(args.clients) <= max(args.clients) < args.num_requests:
        parser.error(f"--clients {args.clients}: each at least 1 and below --num-requests")
    arctic()
    config = read(args.config).applications[0].config
    if (status := relaunched("tests.peers.bench_decisions", config, argv)) is not None:
        return status
    tokenizer = configured_tokenizer(config)
    sources = [each for each in config.speculation if not isinstance(each, DrafterConfig)]
    with tempfile.TemporaryDirectory() as folder:
        config = inflated(config, args.extra_layers, Path(folder, "target"))
        workload = Workload(tokenizer, args.seed, ignore_eos=True)
        loads = {
            (name, clients): workload.load(name, clients, args.num_requests).measured
            for name in traffic
            for clients in args.clients
        }
        recorder = Recorder(config, [each.kind for each in sources])
        rows = []
        for (name, clients), requests in loads.items():
            answers, costs = recorder.record(
                [job_of(each, tokenizer) for each in requests], clients
            )
            in_ms = {f"{key}_ms": round(1e3 * s, 2) for key, s in costs._asdict().items()}
            for row in compare(sources, answers, clients, costs):
                rows.append({"traffic": name, "clients": clients, **row, **in_ms})
        recorder.close()
    print_rows(Console(width=160), "drafts for recorded answers", rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    print(
        json.dumps({"benchmark": "decisions", **circumstances(), "options": options, "rows": rows})
    )
    return 0


def job_of(request: Request, tokenizer: Tokenizer) -> Job:
    """The request for an offline engine. The answer always has ``max_tokens`` tokens."""
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt, add_special_tokens=False)
    sampling = Sampling(
        max_tokens=request.max_tokens, temperature=request.temperature, ignore_eos=True
    )
    return Job(tuple(prompt), sampling)


if __name__ == "__main__":
    raise SystemExit(main())
