"""``specserve``: builds the parser from one module per command, and runs a command."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from specserve import __version__
from specserve.core.errors import MissingExtraError, SpecServeError

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
"""The commands' modules, in the order of the help text. Each has ``add_parser(subparsers)``, which
sets ``run``: a function that takes the parsed arguments and returns the exit code. At its top a
module imports only what its parser needs."""


_EXTRAS = ("vllm", "torch", "transformers", "rouge_score")
"""Packages of the extras ``cpu`` and ``gpu`` alone."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, with the usage hint of the command that got it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; unknown ones are an error of this parser, not of the top-level one."""
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
        The command's exit code; 2 after a SpecServeError, which is printed on stderr; 130 after
        Ctrl-C.

    Raises:
        SystemExit: after SIGTERM; all that the command had started has ended.
    """
    args = build_parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        code = _run(args)
    except SpecServeError as error:
        for line in str(error).splitlines():
            print(f"specserve: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise MissingExtraError("this command", error.name) from None
    return code


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
