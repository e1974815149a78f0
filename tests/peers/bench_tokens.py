"""``specserve bench tokens`` and ``vllm bench serve``: one server, the same requests, in turns.

    python -m tests.peers tokens [--clients 8] [--turns 4] [--number 64]

Both send the same prompts in the same order, greedy and with ``ignore_eos``. The first turn is not
counted, because the draft memory has all texts only after it. vLLM reads its file with pandas,
which is not in the lock: `pip install --no-deps pandas python-dateutil`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from specserve.bench.token_file import write_token_file
from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer
from specserve.core.config import ModelConfig
from specserve.core.errors import SpecServeError
from tests.peers.bench_engine import measured_config
from tests.peers.servers import serve
from tests.peers.tables import print_rows
from tests.peers.workload import Workload

OURS, THEIRS = "specserve bench tokens", "vllm bench serve"
COMMAND = [sys.executable, "-m", "specserve.cli.main"]
MAX_OUTPUT = 96
FIGURES = {
    "tokens_per_second": ("generate_speed", "output_throughput"),
    "first_token_ms": ("first_token_average", "mean_ttft_ms"),
    "seconds": ("latency_for_all", "duration"),
}
"""Our name of each figure, and vLLM's."""


def ours(url: str, folder: Path, clients: int) -> list[str]:
    """Our command line. Figures go to ``found.json``."""
    options = {
        "--url": url,
        "--max-output": str(MAX_OUTPUT),
        "--max-batch-size": str(clients),
        "--warm-up": "0",
        "--save-output": str(folder / "found.json"),
    }
    return ["bench", "tokens", str(folder / "in.csv"), "--ignore-eos", *_words(options)]


def theirs(url: str, folder: Path, clients: int, model: ModelConfig) -> list[str]:
    """vLLM's command line, which takes texts."""
    options = {
        "--base-url": url,
        "--model": model.name,
        "--tokenizer": model.tokenizer or model.path,
        "--dataset-name": "custom",
        "--dataset-path": str(folder / "in.jsonl"),
        "--custom-output-len": str(MAX_OUTPUT),
        "--num-prompts": str(len((folder / "in.jsonl").read_text().splitlines())),
        "--max-concurrency": str(clients),
        "--num-warmups": "0",
        "--temperature": "0",
        "--result-dir": str(folder),
        "--result-filename": "found.json",
    }
    flags = ["--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--save-result"]
    return ["vllm", "--", "bench", "serve", *flags, *_words(options)]


def _words(options: dict[str, str]) -> list[str]:
    return [word for pair in options.items() for word in pair]


def run(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """The figures of one run.

    Raises:
        SpecServeError: the command failed.
    """
    done = subprocess.run([*COMMAND, *command], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SpecServeError(f"{command[:4]} ended with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--number", type=int, default=64, help="requests of a run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = measured_config(args.config)
    tokenizer = configured_tokenizer(config)
    requests = Workload(tokenizer, args.seed).load("plain-code", args.clients, args.number).measured
    texts = [str(each.prompt) for each in requests]
    found: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    with tempfile.TemporaryDirectory() as place, serve("specserve", config) as url:
        folder = Path(place)
        write_token_file(
            folder / "in.csv", [tokenizer.encode(each, add_special_tokens=True) for each in texts]
        )
        lines = [json.dumps({"prompt": each}) for each in texts]
        (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
        commands = {
            OURS: ours(url, folder, args.clients),
            THEIRS: theirs(url, folder, args.clients, config.model),
        }
        for turn in range(args.turns + 1):
            for side in (OURS, THEIRS) if turn % 2 else (THEIRS, OURS):
                figures = run(commands[side], folder)
                found[side] += [figures] if turn else []
    rows = []
    for figure, names in FIGURES.items():
        here, there = (
            [each[key] for each in found[side]]
            for side, key in zip((OURS, THEIRS), names, strict=True)
        )
        rows.append(
            {
                "figure": figure,
                OURS: round(median(here), 2),
                THEIRS: round(median(there), 2),
                "ratio": round(median(x / y for x, y in zip(here, there, strict=True)), 3),
            }
        )
    print_rows(Console(width=100), f"{args.number} requests, {args.clients} at a time", rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    print(json.dumps({"benchmark": "tokens", **circumstances(), "options": options, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
