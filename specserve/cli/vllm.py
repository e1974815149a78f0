"""``specserve vllm -- ARGS``: vLLM's own command, also where vLLM is its build for CPU."""

from __future__ import annotations

import argparse

from specserve.core.errors import MissingExtraError


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
    """
    from specserve.engine.vllm_command import run_vllm

    try:
        run_vllm(args.args[args.args[:1] == ["--"] :])
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vllm") from error
    return 0
