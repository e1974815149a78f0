"""`specserve demo train`: the command line; what needs torch is imported when it runs."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from specserve.core.errors import SpecServeError
from specserve.demo.config import DEVICES, TrainConfig
from specserve.demo.corpus import standard_library


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `demo` with its one sub-command, `train`."""
    demo = subparsers.add_parser("demo", help="make the demo models")
    commands = demo.add_subparsers(dest="demo_command", required=True)
    train = commands.add_parser(
        "train",
        help="train the demo base and its draft model on the standard library",
        description="Trains the DeepSeek-V3-architecture base with its MTP layer, then distils the "
        "Llama draft model from it. Stopped by SIGTERM or Ctrl-C it saves; the same command "
        "continues.",
    )
    add_train_options(train)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """The options of `train`; their meaning is TrainConfig's."""
    add = parser.add_argument
    add("--output", type=Path, default=Path("configs/models"), help="gets demo-base/, demo-draft/")
    add("--work", type=Path, default=Path("demo-training"), help="checkpoints; continued if there")
    add("--corpus", type=Path, default=standard_library(), help="folder of Python files")
    add("--device", default="auto", help=f"one of {', '.join(DEVICES)}")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=60.0, help="training time of the base")
    add("--mtp-minutes", type=float, default=10.0, help="time of the MTP layer alone, after that")
    add("--draft-minutes", type=float, default=15.0, help="training time of the draft model")
    add("--max-tokens", type=int, default=10**12, help="ends training where it comes first")
    add("--batch-tokens", type=int, default=4096, help="tokens of one step")
    add("--checkpoint-s", type=float, default=180.0, help="seconds between checkpoints")
    add("--evaluation-tokens", type=int, default=60_000, help="held-out tokens to measure on")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, measure and write both models; 0 when done, 1 when stopped before the end."""
    names = {field.name for field in fields(TrainConfig)}
    options = {k: v for k, v in vars(arguments).items() if k in names}
    config = TrainConfig(**options)
    try:
        from specserve.demo.pipeline import Pipeline
    except ImportError as error:
        raise SpecServeError(
            f"demo train needs {error.name}: install specserve[cpu] or specserve[gpu]"
        ) from error
    return 0 if Pipeline(config).run() else 1
