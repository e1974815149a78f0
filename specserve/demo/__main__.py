"""`python -m specserve.demo train`: the command without the rest of specserve."""

from __future__ import annotations

import argparse
import sys

from specserve.core.errors import SpecServeError
from specserve.demo.command import add_train_options


def main() -> int:
    """Parse the command line and run it; 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m specserve.demo")
    commands = parser.add_subparsers(required=True)
    add_train_options(commands.add_parser("train"))
    arguments = parser.parse_args()
    try:
        code: int = arguments.run(arguments)
    except SpecServeError as error:
        print(f"specserve.demo: error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
