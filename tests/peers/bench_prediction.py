"""Predicted outputs over HTTP: one server, with another source in each turn.

    python -m tests.peers prediction [--turns 3] [--clients 1 8] [--sets edit,in-prompt,wrong]

Every request is greedy and sent in each state: ``off`` (no speculation), ``ngram``, ``prediction``
and ``auto`` (both). The first turn fills the prefix cache with all prompts and is not counted.

``edit``: only the prediction has the text. The prompt is the beginning of a module. The model's own
continuation without speculation stands for the edited text. The prediction is that text before the
edit: a share of its lines is missing or has another word. Continuations that repeat themselves are
left out, because prompt lookup alone suffices for them, and users do not ask for such text.

``in-prompt``: tasks that copy code from the prompt (rename, repeat, strip docstring). The
prediction is that code.

``wrong``: the requests of ``edit``, each with the prediction of another request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import httpx
from rich.console import Console

from specserve.compare.corpus import load_modules
from specserve.compare.machine import circumstances
from specserve.compare.prompts import Tokenizer, configured_tokenizer
from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import NgramConfig, PredictionConfig
from tests.peers.bench_engine import measured_config
from tests.peers.servers import serve
from tests.peers.tables import print_rows
from tests.peers.workload import edited
from tools.demo_models.tasks import AllTasks

SETS = ("edit", "in-prompt", "wrong")
STATES = ("off", "ngram", "prediction", "auto")
COPIES = ("rename", "repeat", "strip_docstring")
PROMPT_CHARS, TASK_CHARS = 1500, 3000
MAX_TOKENS = 192
WORDS_OF_A_LOOP = 6
"""A text repeats itself if a tenth of its sequences of this many words occur twice."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion and its prediction."""

    prompt: str
    prediction: str

    def body(self, model: str, state: str) -> dict[str, object]:
        """For ``/v1/completions``."""
        xargs = {"speculation": state, "prediction": self.prediction}
        if not self.prediction:
            del xargs["prediction"]
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "vllm_xargs": xargs,
        }


class Question(Protocol):
    """A request to a server."""

    def body(self, model: str, state: str) -> dict[str, object]:
        """For ``/v1/completions``."""
        ...


class Client:
    """Sends requests to a server.

    Args:
        url: URL of the server.
        model: name of the model.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model

    def ask(
        self, asked: Sequence[Question], state: str, num_clients: int
    ) -> tuple[list[str], float]:
        """The answers, and output tokens per second."""
        return asyncio.run(self._ask(asked, state, num_clients))

    async def _ask(
        self, asked: Sequence[Question], state: str, num_clients: int
    ) -> tuple[list[str], float]:
        left = iter(enumerate(asked))
        texts, num_tokens = [""] * len(asked), 0

        async def work(http: httpx.AsyncClient) -> None:
            nonlocal num_tokens
            for index, each in left:
                answer = await http.post("/v1/completions", json=each.body(self._model, state))
                answer.raise_for_status()
                told = answer.json()
                texts[index] = told["choices"][0]["text"]
                num_tokens += told["usage"]["completion_tokens"]

        async with httpx.AsyncClient(base_url=self._url, timeout=600) as http:
            began = time.perf_counter()
            await asyncio.gather(*(work(http) for _ in range(num_clients)))
            return texts, num_tokens / (time.perf_counter() - began)


def edits(client: Client, number: int, share: float, seed: int) -> list[Asked]:
    """The set ``edit``."""
    rng = random.Random(seed)
    packages = Path(sysconfig.get_path("purelib"))
    modules = load_modules(held_out=True) + load_modules(packages, held_out=True)
    prompts = [each.text[:PROMPT_CHARS] for each in modules if len(each.text) > PROMPT_CHARS]
    rng.shuffle(prompts)
    found: list[Asked] = []
    while len(found) < number:
        if not prompts:
            raise ConfigError("--number", number, f"at most {len(found)}: the others' texts repeat")
        prompt = prompts.pop()
        ((text,), _) = client.ask([Asked(prompt, "")], "off", 1)
        before = "".join(edited(text.splitlines(keepends=True), share, rng))
        if before and not _repeats_itself(text):
            found.append(Asked(prompt, before))
    return found


def _repeats_itself(text: str) -> bool:
    words = text.split()
    runs = [tuple(words[at : at + WORDS_OF_A_LOOP]) for at in range(len(words) - WORDS_OF_A_LOOP)]
    return len(runs) < WORDS_OF_A_LOOP or len(set(runs)) < 0.9 * len(runs)


def copies(tokenizer: Tokenizer, number: int, seed: int) -> list[Asked]:
    """The set ``in-prompt``."""
    rng, tasks = random.Random(seed), AllTasks(load_modules(held_out=True))
    found = []
    for index in range(number):
        task = tasks.draw(rng, TASK_CHARS, kind=COPIES[index % len(COPIES)])
        question = task[-2]["content"]
        prompt = tokenizer.apply_chat_template(
            task[:-1], add_generation_prompt=True, tokenize=False
        )
        found.append(Asked(str(prompt), question[question.index("```") :]))
    return found


def measure(
    client: Client, asked: Sequence[Asked], num_clients: int, num_turns: int
) -> dict[str, list[float]]:
    """Output tokens per second of each turn, by state."""
    speeds: dict[str, list[float]] = {state: [] for state in STATES}
    order = list(STATES)
    for turn in range(num_turns + 1):
        for state in order:
            _, speed = client.ask(asked, state, num_clients)
            if turn:
                speeds[state].append(speed)
        order = order[1:] + order[:1]
    return speeds


def rows_of(
    client: Client, tokenizer: Tokenizer, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each set and number of clients."""
    sets: dict[str, list[Asked]] = {}
    if "in-prompt" in args.sets:
        sets["in-prompt"] = copies(tokenizer, args.number, args.seed)
    if {"edit", "wrong"} & set(args.sets):  # the model writes their texts first
        sets["edit"] = of_edits = edits(client, args.number, args.share, args.seed)
        predictions = [each.prediction for each in of_edits[1:] + of_edits[:1]]
        pairs = zip(of_edits, predictions, strict=True)
        sets["wrong"] = [replace(each, prediction=other) for each, other in pairs]
    for name, num_clients in ((name, number) for name in args.sets for number in args.clients):
        speeds = measure(client, sets[name], num_clients, args.turns)
        row: dict[str, Any] = {"set": name, "clients": num_clients, "requests": len(sets[name])}
        row |= {state: round(median(found), 1) for state, found in speeds.items()}
        for state, other in (
            *((state, "off") for state in STATES[1:]),
            *((state, "ngram") for state in STATES[2:]),
        ):
            ratios = [x / y for x, y in zip(speeds[state], speeds[other], strict=True)]
            row[f"{state}/{other}"] = round(median(ratios), 2)
        yield row


def config_of(file: Path) -> AppConfig:
    """The file's application, with prompt lookup and predictions only."""
    config = measured_config(file)
    speculation = (NgramConfig(kind="ngram"), PredictionConfig(kind="prediction"))
    return config.model_copy(update={"speculation": speculation})


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--sets", type=lambda text: text.split(","), default=list(SETS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--number", type=int, default=12, help="requests of a set")
    parser.add_argument("--share", type=float, default=0.05, help="of the lines that are edited")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if unknown := set(args.sets) - set(SETS):
        parser.error(f"--sets: {', '.join(sorted(unknown))} unknown; known are {', '.join(SETS)}")
    config = config_of(args.config)
    tokenizer = configured_tokenizer(config)
    with serve("specserve", config) as url:
        rows = []
        for row in rows_of(Client(url, config.model.name), tokenizer, args):
            print(row, flush=True)
            rows.append(row)
    print_rows(Console(width=160), "output tokens a second, by the source that is asked for", rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    print(
        json.dumps({"benchmark": "prediction", **circumstances(), "options": options, "rows": rows})
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
