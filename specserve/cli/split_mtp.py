"""``specserve split-mtp CHECKPOINT OUT``: writes a checkpoint's MTP module to its own folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to ``subparsers``."""
    parser = subparsers.add_parser(
        "split-mtp",
        help="write a checkpoint's MTP module as a folder of its own",
        description="Writes what a drafter of kind mtp loads: the module's tensors as they are, "
        "config.json and the tokenizer. CHECKPOINT needs only the weight files that contain the "
        "module. Exit code 2 if it has no such module, or OUT is not empty.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the whole checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, new or empty")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the folder.

    Raises:
        SpecServeError: an argument is wrong, or a file cannot be read or written.
    """
    from rich.console import Console

    from specserve.core.new_folder import check_out
    from specserve.drafters.mtp_files import find_mtp, split_mtp

    check_out(args.out)  # before the spinner, which would share a line with the error
    files = find_mtp(args.checkpoint, "CHECKPOINT")
    with Console(stderr=True).status("writing the module"):
        num_bytes = split_mtp(files, args.out)
    print(f"{len(files.tensors):,} tensors, {num_bytes:,} bytes written to {args.out}")
    return 0
