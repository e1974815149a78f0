"""``specserve check CONFIG``: validates a Serve file and prints what it would start, and where."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.cli import plan
from specserve.core.errors import ConfigError, SpecServeError
from specserve.core.importing import without_collections

if TYPE_CHECKING:
    from specserve.core.config import AppConfig, PlacementConfig
    from specserve.engine.checkpoint import Checkpoint
    from specserve.serve.config_file import Application, ServeFile

_DEFAULT = Path("configs/demo.yaml")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to ``subparsers``."""
    parser = subparsers.add_parser(
        "check",
        help="validate a Serve file and print what it would start",
        description="Validates a Serve file without starting anything. Exit code 2 if it is wrong.",
    )
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG",
        help=f"a Serve YAML file (default: {_DEFAULT})",
    )
    parser.add_argument(
        "--ports",
        action="store_true",
        help="also fail if a port that `serve run` needs on this machine is in use",
    )
    plan.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks the file, prints a table for each of its applications and returns exit code 0.

    Raises:
        SpecServeError: the file or the installed vLLM is wrong, or a port is in use.
    """
    from rich.console import Console

    from specserve.engine.vllm_version import check_vllm, is_cpu_build
    from specserve.serve.config_file import read
    from specserve.serve.plan import described_nodes

    gpu_bytes = plan.bytes_of(args.gpu_memory, args.cluster)
    is_elsewhere = args.cluster not in (None, "running")
    if is_elsewhere:
        described_nodes(args.cluster, ())  # reports a wrong option before the slower checks
    on_cpu = is_cpu_build()
    file = read(args.config or _default())
    for application in file.applications:
        check_vllm(application.config)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    checked = [_check(file, app, is_elsewhere, on_cpu) for app in file.applications]
    for rows, notes in checked:
        print_rows(console, rows)
        for note in notes:
            console.print(note)
    if not _has_vllm() and any(app.config.engine.vllm for app in file.applications):
        console.print("engine.vllm was not checked: vLLM is not installed")
    if args.cluster is not None:
        plan.show(console, file, args.cluster, gpu_bytes, on_cpu=on_cpu)
    if args.ports:
        _check_ports(file)
    console.print(f"{file.path}: valid")
    return 0


def _default() -> Path:
    """The path of the Serve file to check by default.

    Raises:
        SpecServeError: the current directory does not have this file.
    """
    if _DEFAULT.exists():
        return _DEFAULT
    found = ", ".join(map(str, sorted(_DEFAULT.parent.glob("*.yaml"))))
    here = f"here are {found}" if found else f"{_DEFAULT.parent}/ has none here"
    raise SpecServeError(f"name the Serve file to check: {here}")


def _check_ports(file: ServeFile) -> None:
    """Checks that the ports of Serve's proxy are free, or in use by the running cluster itself.

    Raises:
        PortError: another process uses a port.
    """
    from ray._private.services import canonicalize_bootstrap_address

    from specserve.serve.ports import require_free, serve_ports

    joins_cluster = canonicalize_bootstrap_address(None) is not None
    require_free(serve_ports(file.host, file.port), joins_cluster=joins_cluster)


def _has_vllm() -> bool:
    return find_spec("vllm") is not None


def _check(
    file: ServeFile, application: Application, is_elsewhere: bool, on_cpu: bool
) -> tuple[dict[str, str], list[str]]:
    """Checks an application; returns its table's rows by title, and notes on what is unchecked."""
    from specserve.cli.draft_checkpoints import check_draft_checkpoints
    from specserve.engine.checkpoint import find_checkpoint
    from specserve.engine.weights import check_weights
    from specserve.trie.log_snapshot import check_snapshot_urls

    config = application.config
    try:
        checkpoint = find_checkpoint(config.model)
        check_weights(config, checkpoint.path, on_cpu=on_cpu and not is_elsewhere)
        if not is_elsewhere:
            check_snapshot_urls(config)
        notes = check_draft_checkpoints(config, checkpoint, is_elsewhere=is_elsewhere)
        if config.engine.vllm and _has_vllm():  # importing vLLM takes seconds
            with without_collections():
                from specserve.engine.args import check_engine_options

            check_engine_options(config)
            if not is_elsewhere:
                _check_adapters(config)
    except ConfigError as error:
        in_file = ConfigError(f"{application.field}.{error.field}", error.value, error.allowed)
        raise SpecServeError(f"{file.path}: {in_file}") from None
    rows = {
        "application": application.name,
        "address": f"http://{file.host}:{file.port}{application.route_prefix.rstrip('/')}/v1",
        "model": f"{', '.join(config.model.names)} ({_origin(checkpoint)})",
        "architecture": checkpoint.architecture or "known when the model is loaded",
        "shards": _shards(config),
        "a shard reserves": _reservation(config.placement, on_cpu),
        "speculation": _sources(config),
        "limits": _limits(config),
        "API keys": _keys(config),
    }
    notes += _short_of_texts(config)
    unset = [each.env for each in config.http.api_keys if not environ.get(each.env)]
    if unset:
        names = ", ".join(unset)
        notes.append(f"the API keys' variables {names} are not set here; `serve run` needs them")
    return rows, notes


def _short_of_texts(config: AppConfig) -> list[str]:
    """A note for each drafter that cannot hold the texts of all running requests."""
    notes = []
    for source in config.placed("actor", "beside_rank_0").values():
        requests, held = config.engine.max_num_seqs, source.max_texts
        if source.placement == "actor":  # shared by all replicas
            requests, held = requests * config.placement.num_replicas, held * source.num_actors
        if held < requests:
            notes.append(
                f"{source.kind} holds {held} texts (max_texts) of the {requests} requests decoded "
                "at once: the others get no drafts from it"
            )
    return notes


def _check_adapters(config: AppConfig) -> None:
    """Checks the paths of LoRA adapters.

    Raises:
        ConfigError: a path is neither an existing folder nor a hub id.
    """
    from specserve.engine.checkpoint import folder_or_id

    for index, adapter in enumerate(config.engine.vllm.get("lora_modules") or ()):
        field = f"engine.vllm.lora_modules.{index}.path"
        try:
            folder_or_id(adapter["path"], field)
        except ConfigError:
            allowed = "an adapter's folder, or a hub id org/name"
            raise ConfigError(field, adapter["path"], allowed) from None


def _origin(checkpoint: Checkpoint) -> str:
    return checkpoint.path if checkpoint.is_local else f"{checkpoint.path}, from the hub"


def _shards(config: AppConfig) -> str:
    replicas = config.placement.num_replicas
    shards = config.engine.tensor_parallel_size
    return f"{replicas} x {shards} (replicas x tensor parallel), placed {config.placement.strategy}"


def _reservation(placement: PlacementConfig, on_cpu: bool) -> str:
    bundle = placement.shard_bundle(on_gpu=not on_cpu)
    return ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items())


def _sources(config: AppConfig) -> str:
    sources = []
    for source in config.speculation:
        options: dict[str, Any] = source.model_dump()
        kind = options.pop("kind")
        given = (f"{key} {value}" for key, value in options.items() if value not in ("", {}))
        sources.append(f"{kind} ({', '.join(given)})")
    return "\n".join(sources) or "none"


def _limits(config: AppConfig) -> str:
    engine, http = config.engine, config.http
    context = f"{engine.max_model_len} tokens" if engine.max_model_len else "the model's own"
    return (
        f"context: {context}; requests decoded at once: {engine.max_num_seqs}, "
        f"{engine.max_num_batched_tokens} tokens a step; waiting: {http.max_queued_requests}"
    )


def _keys(config: AppConfig) -> str:
    keys = config.http.api_keys
    return ", ".join(f"{key.tenant} (from {key.env})" for key in keys) or "none: everyone may call"


def print_rows(console: Any, rows: dict[str, str]) -> None:
    """Prints a table of titles and texts, without markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for title, text in rows.items():
        table.add_row(Text(title, style="bold"), Text(text))
    console.print(table)
