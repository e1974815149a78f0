"""One engine: our drafts, vLLM's, and drafts of the known answer, which show what is possible.

    python -m tests.peers limits [--traffic agent,seen] [--clients 1 8 24] [--turns 4]

One engine serves greedy requests, prompts included. In each turn every contender drafts for the
same requests, and for warm-up requests before them. ``none`` comes first. ``known`` drafts the next
tokens of the answers so far, as many as the configuration's longest draft. A draft takes 10 µs and
is wrong only where rounding changes the answer in a new way. So hardly any drafting method can be
faster. ``ours`` has the sources that need no model of their own.

Ratios are taken within a turn, to the best of ``none`` and vLLM's methods. Tables have the median.
``prompt share`` is the share of the time that steps with prompt tokens take.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer
from specserve.core.config import AppConfig
from specserve.core.source_config import DrafterConfig
from specserve.engine.generation import Job
from specserve.serve.config_file import read
from tests.peers.bench_decisions import job_of
from tests.peers.bench_server import NUM_REQUESTS
from tests.peers.in_process import relaunched, worker_of
from tests.peers.inflate import inflated
from tests.peers.servers import METHODS
from tests.peers.suffix_peer import VllmSuffix, arctic
from tests.peers.tables import print_rows
from tests.peers.workload import TRAFFIC, Workload, known_traffic

# Modules that load vLLM are imported where they are used, after the environment is set.

THEIRS = ("none", "ngram", "suffix")
CONTENDERS = (*THEIRS, "ours", "known")
MATCHED_TOKENS, MAX_SHIFT = 3, 16
"""Where rounding changed the answer, its place is found by the last tokens, so far away at most."""

Drafts = list[list[int]]


class KnownAnswers:
    """Drafts the next tokens of recorded answers.

    Args:
        max_draft_len: longest draft in tokens.
    """

    def __init__(self, max_draft_len: int) -> None:
        self._max_draft_len = max_draft_len
        self._answers: defaultdict[tuple[int, ...], list[list[int]]] = defaultdict(list)

    def record(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Adds an answer to a prompt. Batches of other sizes may round to another answer."""
        if list(answer) not in (answers := self._answers[tuple(prompt)]):
            answers.append(list(answer))

    def draft(self, text: list[int], num_prompt_tokens: int) -> list[int]:
        """The tokens that are expected after a text; none if no answer has its last tokens."""
        answers = self._answers.get(tuple(text[:num_prompt_tokens]), [])
        written = text[num_prompt_tokens:]
        for answer in sorted(answers, key=lambda each: each[: len(written)] != written):
            # The target samples one more token after the draft, which must fit, too.
            room = min(len(answer) - len(written) - 1, self._max_draft_len)
            end = _end_in(answer, written)
            if room > 0 and (end or not written):
                return answer[end : end + room]
        return []


def _end_in(answer: list[int], written: list[int]) -> int:
    """Where the last written tokens end in an answer, nearest to the same place; 0: nowhere."""
    if not written:
        return 0
    tail = written[-MATCHED_TOKENS:]
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        end = len(written) + shift
        if len(tail) <= end and answer[end - len(tail) : end] == tail:
            return end
    return 0


class SwitchedEngine:
    """An engine with the local sources, whose drafts can come from another contender instead.

    Args:
        config: application.
    """

    def __init__(self, config: AppConfig) -> None:
        from specserve.engine.methods import parse_method
        from specserve.engine.offline import OfflineEngine
        from specserve.engine.scheduler import DraftScheduler

        local = [each for each in config.speculation if not isinstance(each, DrafterConfig)]
        method = parse_method("+".join(each.kind for each in local), config)
        self._engine = OfflineEngine(config, method)
        # Within a turn, prompts stay in the prefix cache, as in a server.
        self._clear = self._engine._engine.reset_prefix_cache
        self._engine._engine.reset_prefix_cache = lambda: True
        self._known = KnownAnswers(max(each.max_draft_len for each in local))
        self._runner = worker_of(self._engine).model_runner
        self._hook, self._suffix = self._runner.drafter, VllmSuffix(_num_tokens("suffix"))
        # vLLM's worker does not start in a process that has imported numba.
        from tests.peers.drafting_sides import ngram_proposer

        limits = config.engine.max_num_seqs, self._runner.max_model_len
        self._ngram = ngram_proposer(METHODS["ngram"], *limits)
        self._drafts: Mapping[str, Callable[[Drafts], Drafts]] = {
            "none": lambda sampled: [[] for _ in sampled],
            "ngram": self._from_ngram,
            "suffix": self._from_suffix,
            "known": self._from_answers,
        }
        self._name = "ours"
        self._steps: list[tuple[float, bool]] = []  # end, and whether it had prompt tokens
        self._runner.propose_draft_token_ids = self._propose
        DraftScheduler.draft_first_with(self._propose_first)

    def run(
        self, name: str, warm_up: Sequence[Job], jobs: Sequence[Job], num_clients: int
    ) -> dict[str, float]:
        """Tokens per second of the jobs with a contender, and the share of steps with prompts."""
        self._name = name
        self._hook._num_idle_steps_left = 0
        self._clear()
        self._engine.run(warm_up, num_clients, lambda *_: None)
        self._steps.clear()
        began = time.perf_counter()
        completions = self._engine.run(jobs, num_clients, lambda *_: None).completions
        seconds, last, with_prompts = time.perf_counter() - began, began, 0.0
        for end, has_prompt in self._steps:
            with_prompts += (end - last) * has_prompt
            last = end
        for job, each in zip(jobs, completions, strict=True):
            self._known.record(job.prompt_token_ids, each.token_ids)
        num_tokens = sum(len(each.token_ids) for each in completions)
        return {"tokens_per_second": num_tokens / seconds, "prompt_share": with_prompts / seconds}

    def close(self) -> None:
        """Stops the engine."""
        self._engine.close()

    def _propose(self, scheduler_output: Any, sampled: Drafts, *rest: object) -> Drafts:
        if self._name == "ours":
            drafts: Drafts = self._hook.propose_draft_token_ids(scheduler_output, sampled, *rest)
        else:
            drafts = self._drafts[self._name](sampled)
        scheduled = scheduler_output.scheduled_spec_decode_tokens.values()
        num_decoded = len(scheduler_output.num_scheduled_tokens) + sum(map(len, scheduled))
        has_prompt = scheduler_output.total_num_scheduled_tokens > num_decoded
        self._steps.append((time.perf_counter(), has_prompt))
        return drafts

    def _propose_first(self, requests: Sequence[Any], num_requests: int) -> Drafts:
        if self._name == "ours":
            drafts: Drafts = self._hook.draft_first(requests, num_requests)
            return drafts
        if self._name == "known":
            texts = [each.prompt_token_ids for each in requests]
            return [self._known.draft(each, len(each)) for each in texts]
        return [[] for _ in requests]

    def _from_ngram(self, sampled: Drafts) -> Drafts:
        batch = self._runner.input_batch
        drafts: Drafts = self._ngram.propose(
            _num_tokens("ngram"), sampled, batch.num_tokens_no_spec, batch.token_ids_cpu
        )
        return drafts

    def _from_suffix(self, sampled: Drafts) -> Drafts:
        peer = self._suffix
        drafts: Drafts = peer.proposer.propose(
            peer.max_draft_len, self._runner.input_batch, sampled
        )
        return drafts

    def _from_answers(self, sampled: Drafts) -> Drafts:
        batch = self._runner.input_batch
        return [
            self._known.draft(
                batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist(),
                batch.num_prompt_tokens[row],
            )
            for row in range(len(sampled))
        ]


def _num_tokens(method: str) -> int:
    num_tokens: int = METHODS[method]["num_speculative_tokens"]
    return num_tokens


def summarise(
    place: tuple[str, int], found: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[dict[str, Any]]:
    """A row for each contender from its results by turn."""
    speeds = {name: [each["tokens_per_second"] for each in runs] for name, runs in found.items()}
    best = [max(each) for each in zip(*(speeds[name] for name in THEIRS), strict=True)]
    ratios = {
        name: [a / b for a, b in zip(of_name, best, strict=True)]
        for name, of_name in speeds.items()
    }
    return [
        {
            "traffic": place[0],
            "clients": place[1],
            "contender": name,
            "tokens_per_second": round(median(speeds[name])),
            "x_best": round(median(ratios[name]), 3),
            "prompt_share": round(median(each["prompt_share"] for each in runs), 2),
            "each_x_best": [round(each, 3) for each in ratios[name]],
        }
        for name, runs in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--traffic", default="never-seen,agent,seen", help=", ".join(TRAFFIC))
    parser.add_argument("--clients", type=int, nargs="+", default=list(NUM_REQUESTS))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    traffic = known_traffic(parser, args.traffic)
    arctic()
    config = read(args.config).applications[0].config
    if (status := relaunched("tests.peers.bench_limits", config, argv)) is not None:
        return status
    tokenizer, console = configured_tokenizer(config), Console(width=160)
    workload, rows = Workload(tokenizer, args.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        engine = SwitchedEngine(inflated(config, args.extra_layers, Path(folder, "target")))
        for place in [(name, number) for name in traffic for number in args.clients]:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
            for turn in range(args.turns):
                load = workload.load(*place, NUM_REQUESTS.get(place[1], 3 * place[1]))
                warm_up, jobs = (
                    [job_of(replace(each, temperature=0.0), tokenizer) for each in requests]
                    for requests in (load.warm_up, load.measured)
                )
                others = CONTENDERS[1:]
                begin = turn % len(others)
                for name in (CONTENDERS[0], *others[begin:], *others[:begin]):
                    found[name].append(engine.run(name, warm_up, jobs, place[1]))
            of_place = summarise(place, found)
            print_rows(console, f"{place[0]}, {place[1]} clients", of_place)
            rows += of_place
        engine.close()
    options = {key: value for key, value in vars(args).items() if key != "config"}
    print(json.dumps({"benchmark": "limits", **circumstances(), "options": options, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
