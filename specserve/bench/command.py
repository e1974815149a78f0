"""``specserve bench tokens FILE``: measures the performance of requests given as token ids."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.compare.arguments import AUTO, at_least_zero, in_existing_folder, number_from
from specserve.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from specserve.bench.server import Server
    from specserve.bench.token_file import TokenIds
    from specserve.engine.generation import Job

# `run` imports the rest, so that `specserve --help` stays fast.


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser("bench", help="measure a server or an engine")
    kinds = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    tokens = kinds.add_parser(
        "tokens",
        help="run a file of token ids, and print latencies, throughput and acceptance",
        description="Each line of FILE is one request: decimal token ids, separated by commas. The "
        "warm-up runs the first requests of the file. Sources that draft from earlier texts, such "
        "as trie, then already know these.",
    )
    add = tokens.add_argument
    add("file", type=Path, metavar="FILE", help="one request per line")
    where = tokens.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="address of a server; its key in OPENAI_API_KEY")
    where.add_argument("--config", type=Path, help="Serve file, whose engine is started here")
    add("--max-output", type=number_from(1), default=256, help="default: %(default)s")
    add("--max-batch-size", type=number_from(1), default=16, help="requests at a time (default: "
        "%(default)s)")  # fmt: skip
    add("--warm-up", type=number_from(0), default=10, help="requests that are run beforehand and "
        "not counted (default: %(default)s)")  # fmt: skip
    add("--speculation", default=AUTO, metavar="KIND", help="auto: draft by all sources; off: no "
        "drafts; or the kind of one source (default: %(default)s)")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--top-k", type=number_from(0), default=0, help="0: all (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="default: %(default)s")
    add("--seed", type=number_from(0), default=None, help="of each request (default: none)")
    add("--ignore-eos", action="store_true", help="go on after the end token")
    add("--record-output", type=Path, metavar="FILE", help="write the output's token ids, one "
        "request per line")  # fmt: skip
    add("--save-output", type=Path, metavar="FILE", help="write the figures as JSON")
    tokens.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the requests and prints the figures.

    Raises:
        SpecServeError: an argument or a line of the file is wrong, or a request failed.
    """
    from rich.console import Console

    from specserve.bench.figures import figures
    from specserve.bench.local import LocalModel
    from specserve.bench.server import Server, find_server
    from specserve.bench.token_file import read_token_file, write_token_file
    from specserve.compare.display import progress_bar
    from specserve.compare.report import write_json
    from specserve.engine.generation import by_source

    in_existing_folder("--record-output", args.record_output)
    in_existing_folder("--save-output", args.save_output)
    with contextlib.ExitStack() as stack:
        model: Server | LocalModel
        model = find_server(args.url) if args.url else LocalModel(args.config, stack)
        requests = read_token_file(
            args.file, max_tokens=model.max_model_len - 1, vocab_size=model.vocab_size
        )
        if isinstance(model, Server):
            _check_largest(model, args.file, requests)
        jobs = _jobs(args, requests)
        model.start(args.speculation)
        console = Console(stderr=True)
        if warm_up := jobs[: args.warm_up]:
            with progress_bar(console, "warm-up", len(warm_up), stays=False) as progress:
                model.run(warm_up, args.max_batch_size, progress)
        with progress_bar(console, "performance", len(jobs), stays=False) as progress:
            result = model.run(jobs, args.max_batch_size, progress)
    sources = by_source(result.completions)
    if result.drafts:  # a local engine's counts, which include vLLM's own drafts
        sources = {
            each.source: {
                "drafted_tokens": each.num_draft_tokens,
                "accepted_tokens": each.num_accepted_tokens,
            }
            for each in result.drafts
        }
    served = {
        "model_name": model.name,
        "server_count": 1,
        "tp": model.num_devices or None,
        "pp": 1 if model.num_devices else None,
    }
    found = served | figures(result, [len(each) for each in requests], model.num_devices)
    _print(Console(markup=False), found, sources)
    if args.save_output:
        write_json(args.save_output, found | {"sources": sources})
    if args.record_output:
        write_token_file(args.record_output, [each.token_ids for each in result.completions])
    return 0


def _check_largest(server: Server, file: Path, requests: Sequence[TokenIds]) -> None:
    """Checks that the server accepts the largest token id; its API has no vocabulary size.

    Raises:
        ConfigError: the server refuses the token id.
    """
    largest, line = max((max(each), line) for line, each in enumerate(requests, 1))
    if reason := server.refusal(largest):
        allowed = f"a token id that the server's model has ({reason})"
        raise ConfigError(f"{file}: line {line}", largest, allowed)


def _jobs(args: argparse.Namespace, requests: Sequence[TokenIds]) -> list[Job]:
    from specserve.engine.generation import Job, Sampling

    if not 0 < args.top_p <= 1:
        raise ConfigError("--top-p", args.top_p, "a number above 0 and up to 1")
    sampling = Sampling(
        max_tokens=args.max_output,
        temperature=at_least_zero("--temperature", args.temperature),
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    return [Job(each, sampling) for each in requests]


def _print(console: Console, found: dict[str, Any], sources: dict[str, dict[str, int]]) -> None:
    for name, value in found.items():
        if value is not None:
            shown = f"{value:.3f}" if isinstance(value, float) else value
            console.print(f"{name:24}{shown}", highlight=False)
    for source, each in sources.items():
        drafted, accepted = each["drafted_tokens"], each["accepted_tokens"]
        share = f" ({accepted / drafted:.0%})" if drafted else ""
        console.print(
            f"{source}: {drafted} tokens drafted, {accepted} accepted{share}", highlight=False
        )
