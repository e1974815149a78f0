"""Structured outputs over HTTP: one server, with and without drafts from grammars.

    python -m tests.peers grammar [--turns 3] [--clients 1 8] [--any-whitespace]

Ten JSON schemas are answered greedily, each with the schema in the prompt. The states are ``off``
(no speculation), ``grammar`` alone, ``ngram`` and ``auto`` (both). The first turn is not counted.
In it the prefix cache learns the prompts, and both compilers the schemas.

``accepted`` is the share of verified draft tokens that were accepted with ``grammar`` alone.
``equal`` counts the answers that are the same as without speculation, over all states and turns.
In bfloat16 an answer may differ, as it may in a batch of another size without drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from specserve.compare.machine import circumstances
from specserve.core.config import AppConfig
from specserve.core.source_config import GrammarConfig, NgramConfig
from tests.integration.api import Api
from tests.peers.bench_engine import measured_config
from tests.peers.bench_prediction import Client
from tests.peers.schemas import SCHEMAS, Schema, question
from tests.peers.servers import serve
from tests.peers.tables import print_rows

STATES = ("off", "grammar", "ngram", "auto")
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion that follows a schema."""

    schema: Schema

    def body(self, model: str, state: str) -> dict[str, object]:
        """Body for ``/v1/completions``."""
        return {
            "model": model,
            "prompt": question(self.schema),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "structured_outputs": {"json": self.schema},
            "vllm_xargs": {"speculation": state},
        }


def counted(url: str) -> tuple[int, int]:
    """(verified, accepted) draft tokens of ``grammar`` so far."""
    told = Api(url).speculation()["acceptance"].get("grammar", {})
    return told.get("draft_tokens", 0), told.get("accepted_tokens", 0)


def row_of(url: str, client: Client, num_clients: int, num_turns: int) -> dict[str, Any]:
    """Results of all turns with this number of clients."""
    asked = [Asked(schema) for schema in SCHEMAS.values()]
    speeds: dict[str, list[float]] = {state: [] for state in STATES}
    expected, _ = client.ask(asked, "off", num_clients)
    drafted = accepted = equal = 0
    order = list(STATES)
    for turn in range(num_turns + 1):
        for state in order:
            before = counted(url)
            texts, speed = client.ask(asked, state, num_clients)
            if not turn:
                continue
            speeds[state].append(speed)
            equal += sum(x == y for x, y in zip(texts, expected, strict=True))
            if state == "grammar":
                after = counted(url)
                drafted += after[0] - before[0]
                accepted += after[1] - before[1]
        order = order[1:] + order[:1]
    row: dict[str, Any] = {"clients": num_clients, "schemas": len(asked)}
    row |= {state: round(median(found), 1) for state, found in speeds.items()}
    for state in STATES[1:]:
        ratios = [x / y for x, y in zip(speeds[state], speeds["off"], strict=True)]
        row[f"{state}/off"] = round(median(ratios), 2)
    row["drafted"], row["accepted"] = drafted, round(accepted / max(drafted, 1), 3)
    row["equal"] = f"{equal} of {len(asked) * len(STATES) * num_turns}"
    return row


def rows_of(url: str, client: Client, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of clients."""
    for num_clients in args.clients:
        yield row_of(url, client, num_clients, args.turns)


def config_of(file: Path, *, any_whitespace: bool) -> AppConfig:
    """The file's application, with prompt lookup and grammars only."""
    config = measured_config(file)
    outputs = {"backend": "xgrammar", "disable_any_whitespace": not any_whitespace}
    vllm = {**config.engine.vllm, "structured_outputs_config": outputs}
    engine = config.engine.model_copy(update={"vllm": vllm})
    speculation = (NgramConfig(kind="ngram"), GrammarConfig(kind="grammar"))
    return config.model_copy(update={"engine": engine, "speculation": speculation})


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--any-whitespace", action="store_true", help="JSON may have whitespace, vLLM's default"
    )
    args = parser.parse_args(argv)
    config = config_of(args.config, any_whitespace=args.any_whitespace)
    with serve("specserve", config) as url:
        rows = []
        for row in rows_of(url, Client(url, config.model.name), args):
            print(row, flush=True)
            rows.append(row)
    print_rows(Console(width=160), "output tokens a second, by the source that is asked for", rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    print(json.dumps({"benchmark": "grammar", **circumstances(), "options": options, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
