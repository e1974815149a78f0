"""``python -m tools.demo_models`` trains the demo models; stopped, it continues."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specserve.compare.corpus import standard_library
from specserve.core.errors import SpecServeError
from tools.demo_models.config import DEVICES, TrainConfig
from tools.demo_models.pipeline import Pipeline


def parse(argv: Sequence[str] | None) -> TrainConfig:
    """The options of a command line; their meaning is TrainConfig's."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_models",
        description="Trains the DeepSeek-V3-architecture base with its MTP layer, then distils the "
        "Llama draft model from it. Stopped by SIGTERM or Ctrl-C it saves; the same command "
        "continues.",
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("configs/models"), help="gets demo-base/, demo-draft/")
    add("--work", type=Path, default=Path("demo-training"), help="checkpoints; continued if there")
    add("--corpus", type=Path, default=standard_library(), help="folder of Python files")
    add("--from", dest="start", type=Path, help="folder with the weights to train on from")
    add("--packages", type=Path, help="site-packages folder to train on too")
    add("--device", default="auto", help=f"one of {', '.join(DEVICES)}")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=60.0, help="training time of the base")
    add("--mtp-minutes", type=float, default=10.0, help="time of the MTP layer alone, after that")
    add("--draft-minutes", type=float, default=15.0, help="training time of the draft model")
    add("--max-tokens", type=int, default=10**12, help="ends training where it comes first")
    add("--batch-tokens", type=int, default=4096, help="tokens of one step")
    add("--checkpoint-s", type=float, default=180.0, help="seconds between checkpoints")
    add("--evaluation-tokens", type=int, default=60_000, help="held-out tokens to measure on")
    return TrainConfig(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, measures and writes both models.

    Returns:
        The exit code: 0 when done, 1 when stopped before the end, 2 for a user's mistake.
    """
    try:
        return 0 if Pipeline(parse(argv)).run() else 1
    except SpecServeError as error:
        print(f"demo_models: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
