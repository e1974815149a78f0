"""``specserve bench tokens FILE``: a performance run over requests that are token ids."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.compare.arguments import (
    at_least_zero,
    in_existing_folder,
    number_from,
    only_application,
)
from specserve.core.errors import ConfigError, SpecServeError

if TYPE_CHECKING:
    from rich.console import Console

    from specserve.bench.token_file import TokenIds
    from specserve.engine.generation import Job, RunResult

AUTO, OFF = "auto", "off"

# The rest is imported when the command runs: the parser of all commands must stay quick.


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser("bench", help="measure a server or an engine")
    kinds = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    tokens = kinds.add_parser(
        "tokens",
        help="run a file of token ids, and print latencies, throughput and acceptance",
        description="FILE has a line a request: decimal token ids, separated by commas. The "
        "warm-up runs requests from the beginning of the file, and what drafts from earlier texts "
        "has seen these then.",
    )
    add = tokens.add_argument
    add("file", type=Path, metavar="FILE", help="a line a request")
    where = tokens.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="address of a server; its key in OPENAI_API_KEY")
    where.add_argument("--config", type=Path, help="Serve file, whose engine is started here")
    add("--max-output", type=number_from(1), default=256, help="default: %(default)s")
    add("--max-batch-size", type=number_from(1), default=16, help="requests at a time (default: "
        "%(default)s)")  # fmt: skip
    add("--warm-up", type=number_from(0), default=10, help="requests that are run beforehand and "
        "not counted (default: %(default)s)")  # fmt: skip
    add("--speculation", default=AUTO, metavar="KIND", help="auto: by all sources of the server or "
        "the file; off: by none; or the kind of one (default: %(default)s)")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--top-k", type=number_from(0), default=0, help="0: all (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="default: %(default)s")
    add("--seed", type=number_from(0), default=None, help="of each request (default: none)")
    add("--ignore-eos", action="store_true", help="go on after the end token")
    add("--record-output", type=Path, metavar="FILE", help="write the output's token ids, a line "
        "a request")  # fmt: skip
    add("--save-output", type=Path, metavar="FILE", help="write the figures as JSON")
    tokens.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the requests and prints the figures.

    Raises:
        SpecServeError: an argument or a line of the file is wrong, or a request failed.
    """
    from rich.console import Console

    from specserve.bench.figures import figures
    from specserve.bench.token_file import write_token_file
    from specserve.compare.report import write_json

    in_existing_folder("--record-output", args.record_output)
    in_existing_folder("--save-output", args.save_output)
    requests, model, result, sources = _run_server(args) if args.url else _run_engine(args)
    found = model | figures(result, [len(each) for each in requests], model["tp"] or 0)
    _print(Console(), found, sources)
    if args.record_output:
        write_token_file(args.record_output, [each.token_ids for each in result.completions])
    if args.save_output:
        write_json(args.save_output, found | {"sources": sources})
    return 0


Run = tuple["list[TokenIds]", dict[str, Any], "RunResult", dict[str, dict[str, int]]]
"""The requests, what served them, the result, and tokens drafted and accepted by source."""


def _run_server(args: argparse.Namespace) -> Run:
    from rich.console import Console

    from specserve.bench.server import find_server
    from specserve.bench.token_file import read_token_file
    from specserve.compare.display import progress_bar
    from specserve.engine.generation import by_source

    server = find_server(args.url)
    requests = read_token_file(args.file, max_tokens=server.max_model_len - 1)
    largest, line = max((max(each), line) for line, each in enumerate(requests, 1))
    if reason := server.refusal(largest):
        allowed = f"a token id that the server's model has ({reason})"
        raise ConfigError(f"{args.file}: line {line}", largest, allowed)
    jobs = _jobs(args, requests)
    controls: dict[str, Any] = {}
    if args.speculation != AUTO:
        controls["speculation"] = args.speculation
        if reason := server.refusal(largest, speculation=args.speculation):
            raise SpecServeError(f"--speculation: {reason}")
    with progress_bar(Console(stderr=True), "requests", len(jobs)) as progress:
        server.fields = {"vllm_xargs": controls}
        server.run_timed(jobs[: args.warm_up], args.max_batch_size, lambda *_: None)
        server.fields = {"vllm_xargs": controls | server.report()}
        result = server.run_timed(jobs, args.max_batch_size, progress)
    model = {"model_name": server.name, "server_count": 1, "tp": None, "pp": None}
    return requests, model, result, by_source(result.completions)


def _run_engine(args: argparse.Namespace) -> Run:
    from rich.console import Console

    from specserve.bench.token_file import read_token_file
    from specserve.compare.display import progress_bar
    from specserve.compare.engine_process import EngineProcess
    from specserve.engine.checkpoint import text_sizes
    from specserve.engine.methods import ALL, NONE, parse_method

    config = only_application(args.config)
    max_tokens, vocab_size = text_sizes(config)
    requests = read_token_file(args.file, max_tokens=max_tokens - 1, vocab_size=vocab_size)
    jobs = _jobs(args, requests)
    kinds = [source.kind for source in config.speculation]
    if args.speculation not in (AUTO, OFF, *kinds):
        raise ConfigError("--speculation", args.speculation, ", ".join([AUTO, OFF, *kinds]))
    name = {AUTO: ALL if kinds else NONE, OFF: NONE}.get(args.speculation, args.speculation)
    method = parse_method(name, config)
    console = Console(stderr=True)
    with EngineProcess(config, method) as engine:
        with console.status("loading the model"):
            engine.wait_ready()
        with progress_bar(console, "requests", len(jobs)) as progress:
            if args.warm_up:
                engine.run(jobs[: args.warm_up], args.max_batch_size)
            result = engine.run(jobs, args.max_batch_size, progress)
    sources = {
        each.source: {
            "drafted_tokens": each.num_draft_tokens,
            "accepted_tokens": each.num_accepted_tokens,
        }
        for each in result.drafts
    }
    tensor_parallel = config.engine.tensor_parallel_size
    model = {"model_name": config.model.name, "server_count": 1, "tp": tensor_parallel, "pp": 1}
    return requests, model, result, sources


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
