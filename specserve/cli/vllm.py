"""``specserve vllm -- ARGS``: runs vLLM's own command, also with vLLM's CPU build."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from specserve.core.errors import MissingExtraError, SpecServeError, reason_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "vllm",
        help="run vLLM's own command, such as `bench serve` or `chat`",
        description="Runs vLLM's command with ARGS, also under vLLM's build for CPU.",
        epilog="example: specserve vllm -- bench serve --help",
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="-- ARGS", help="for vLLM")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs vLLM's command, which may end the process itself.

    Raises:
        MissingExtraError: vLLM is not installed.
        SpecServeError: the vLLM command needs a package that is not installed.
    """
    from specserve.engine.vllm_command import run_vllm

    try:
        run_vllm(args.args[args.args[:1] == ["--"] :])
    except ImportError as error:
        if find_spec("vllm") is None:
            raise MissingExtraError("vllm") from error
        raise SpecServeError(f"vllm: {reason_of(error)}") from error
    return 0
