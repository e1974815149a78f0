"""``specserve check CONFIG --cluster ...``: prints the placement on nodes and the memory use."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from specserve.cli.cluster import connected
from specserve.core.errors import ConfigError, SpecServeError

if TYPE_CHECKING:
    from rich.console import Console

    from specserve.core.config import AppConfig
    from specserve.serve.config_file import ServeFile
    from specserve.serve.plan import Node, Plan

_SIZE = re.compile(r"(\d+(?:\.\d+)?)(GiB|GB)")
_UNITS = {"GiB": 1 << 30, "GB": 10**9}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--cluster`` and ``--gpu-memory`` to the parser of ``check``."""
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="also print which node would run what. `running`: on the Ray cluster that runs here, "
        "as if nothing else ran on it. NODESxGPUS, such as 2x8: on nodes with that many GPUs, and "
        "with enough CPUs and custom resources. NODESxCPUScpu: on nodes without GPUs. Groups are "
        "joined by +: 2x8+1x1. For described nodes the model's config.json is enough; a note says "
        "what was not checked. Exit code 2 if something does not fit",
    )
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="with --cluster: memory of a GPU, in GiB or GB (10^9 bytes) (default: 80GiB)",
    )


def bytes_of(gpu_memory: str | None, cluster: str | None) -> float:
    """The bytes that ``--gpu-memory`` names.

    Raises:
        ConfigError: it is no size, or there is no ``--cluster`` to plan for.
    """
    size = _SIZE.fullmatch(gpu_memory or "80GiB")
    if size is None or not float(size[1]):
        raise ConfigError("--gpu-memory", gpu_memory, "a size such as 80GiB or 80GB")
    if gpu_memory and cluster is None:
        raise ConfigError("--gpu-memory", gpu_memory, "only with --cluster, whose plan it is for")
    return float(size[1]) * _UNITS[size[2]]


def show(console: Console, file: ServeFile, cluster: str, gpu_bytes: float, on_cpu: bool) -> None:
    """Prints the plans of a file's applications, placed one after another on the same nodes.

    ``cluster`` is the option; ``on_cpu``: vLLM's build here is for CPU.

    Raises:
        SpecServeError: an option is wrong, or something does not fit.
    """
    from specserve.serve.plan import plan

    configs = [application.config for application in file.applications]
    nodes, on_gpu = _nodes(cluster, configs, on_cpu)
    for application in file.applications:
        try:
            planned = plan(application.config, nodes, on_gpu=on_gpu)
            _print_plan(console, nodes, planned)
            _print_memory(console, application.config, gpu_bytes if on_gpu else 0.0)
        except SpecServeError as error:
            raise SpecServeError(f"{file.path}: {application.field}: {error}") from None
        nodes = list(planned.left)


def _nodes(cluster: str, configs: list[AppConfig], on_cpu: bool) -> tuple[list[Node], bool]:
    from specserve.serve.placement import running_nodes
    from specserve.serve.plan import described_nodes

    if cluster == "running":
        with connected("auto"):
            return running_nodes(), not on_cpu
    marks: list[str] = []
    for config in configs:
        marks += config.placement.shard_resources
        for source in config.placed("actor", "beside_rank_0").values():
            marks += source.resources
    return described_nodes(cluster, marks)


def _print_plan(console: Console, nodes: list[Node], planned: Plan) -> None:
    from rich.table import Table

    from specserve.serve.plan import describe

    table = Table("node", "free before", "shards", "drafters", box=None, padding=(0, 2, 0, 0))
    for index, node in enumerate(nodes):
        shards = [
            f"replica {number}: {_ranks([r for r, where in enumerate(ranks) if where == index])}"
            for number, ranks in enumerate(planned.replicas)
            if index in ranks
        ]
        drafters = [kind for kind, where in planned.drafters if where == index]
        table.add_row(node.name, describe(node.resources), "\n".join(shards), "\n".join(drafters))
    console.print(table)


def _ranks(ranks: list[int]) -> str:
    """Formats the ranks of one replica on one node; they are consecutive."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _print_memory(console: Console, config: AppConfig, gpu_bytes: float) -> None:
    """Prints the memory of a shard and of each drafter; raises PlacementError if it is too much.

    ``gpu_bytes``: memory of one GPU; 0: shards compute on CPU.
    """
    from specserve.engine.memory_estimate import (
        NoEstimateError,
        check_drafter,
        check_shard,
        drafter_memory,
        in_words,
        shard_memory,
    )

    try:
        shard = shard_memory(config, on_cpu=not gpu_bytes)
        drafts = ""
        if gpu_bytes and shard.verification_bytes:
            drafts = f", {in_words(shard.verification_bytes)} to verify drafts"
        console.print(
            f"a shard: {in_words(shard.weights_bytes)} of weights, "
            f"{shard.kv_token_bytes:,} bytes of KV cache a token{drafts}"
        )
        if gpu_bytes:
            num_tokens = check_shard(config, shard, gpu_bytes)
            console.print(
                f"its KV cache on a GPU with {in_words(gpu_bytes)}: {num_tokens:,} tokens, "
                "less what activations and CUDA graphs take"
            )
    except NoEstimateError as error:
        console.print(f"a shard's memory was not estimated: {error}")
    for source in config.placed("actor", "beside_rank_0").values():
        try:
            drafter = drafter_memory(config, source)
        except NoEstimateError as error:
            console.print(f"the {source.kind} drafter's memory was not estimated: {error}")
            continue
        part_bytes = source.num_gpus * gpu_bytes
        place = ""
        if part_bytes and source.placement == "beside_rank_0":
            part = f"{in_words(part_bytes)} ({source.num_gpus:g})"
            place = f", in the {part} that it has of rank 0's GPU"
        console.print(
            f"the {source.kind} drafter: {in_words(drafter.weights_bytes)} of weights, "
            f"{in_words(drafter.kv_cache_bytes)} of KV cache for {source.max_texts} texts{place}"
        )
        if part_bytes:
            check_drafter(source, drafter, gpu_bytes)
