"""``specserve``: one parser, one module a command."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from specserve import __version__
from specserve.core.errors import SpecServeError

_COMMANDS = (
    "specserve.cli.check",
    "specserve.generate.command",
    "specserve.compare.command",
    "specserve.evaluate.command",
    "specserve.bench.command",
    "specserve.cli.vllm",
    "specserve.cli.trie",
    "specserve.cli.split_mtp",
    "specserve.cli.shard_weights",
)
"""In the order of use. Modules with an ``add_parser(subparsers)`` that sets ``run``, a function of
the parsed arguments that returns the exit code. They import at their top only what their parser
needs."""


class _Parser(argparse.ArgumentParser):
    """Tells a wrong argument in one line, and every command its own unknown ones."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What it knows of the arguments; what it does not know is an error here already."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the command with exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="specserve",
        description="Large language models with lossless speculative decoding.",
        epilog="`serve run CONFIG` serves what `specserve check CONFIG` found valid.",
    )
    parser.add_argument("--version", action="version", version=f"specserve {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        import_module(module).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code: 0, or what the command says; 2 for a user's mistake, told on stderr, a
        line each; 130 when interrupted.

    Raises:
        SystemExit: SIGTERM came; what the command had started has ended.
    """
    args = build_parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        code: int = args.run(args)
    except SpecServeError as error:
        for line in str(error).splitlines():
            print(f"specserve: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
