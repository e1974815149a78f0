"""``python -m tools.demo_models`` trains the demo models, or resumes a stopped training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specserve.core.errors import SpecServeError
from tools.demo_models.config import DEVICES, TrainConfig
from tools.demo_models.pipeline import Pipeline


def parse(argv: Sequence[str] | None) -> TrainConfig:
    """Parses the options. Defaults come from TrainConfig."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_models",
        description="Trains the DeepSeek-V3-architecture base with its MTP layer, then distils the "
        "Llama draft model from it. SIGTERM or Ctrl-C saves a checkpoint and stops; the same "
        "command resumes.",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--output", type=Path, help="folder for demo-base/ and demo-draft/")
    add("--work", type=Path, help="folder of checkpoints; resumes from existing ones")
    add("--corpus", type=Path, help="folder of Python files")
    add("--from", dest="start", type=Path, help="folder with the initial weights")
    add("--packages", type=Path, help="site-packages folder, as further training data")
    add("--device", help=f"one of {', '.join(DEVICES)}")
    add("--seed", type=int)
    add("--minutes", type=float, help="training time of the base")
    add("--mtp-minutes", type=float, help="training time of the MTP layer alone, after the base")
    add("--draft-minutes", type=float, help="training time of the draft model")
    add("--max-tokens", type=int, help="most tokens of each training")
    add("--batch-tokens", type=int, help="tokens of one step")
    add("--checkpoint-s", type=float, help="seconds between checkpoints")
    add("--evaluation-tokens", type=int, help="held-out tokens to measure on")
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
