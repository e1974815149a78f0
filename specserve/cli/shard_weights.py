"""``specserve shard-weights --config FILE OUT``: writes a checkpoint divided by shard."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.core.errors import ConfigError

if TYPE_CHECKING:
    from specserve.core.config import AppConfig

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
"""Files of a checkpoint that are not copied."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to ``subparsers``."""
    parser = subparsers.add_parser(
        "shard-weights",
        help="write a checkpoint divided among the shards, which then start faster",
        description="Starts the shards of a Serve file once, and has each write its part of the "
        "weights. Configuration and tokenizer are copied as they are. Serve the folder with "
        "`model.path: OUT` and `engine.vllm.load_format: sharded_state`. Exit code 2 if the file "
        "is wrong, or OUT is not empty.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, new or empty, in "
        "an existing folder that all nodes share")  # fmt: skip
    parser.add_argument("--config", type=Path, required=True, help="Serve configuration file")
    parser.add_argument(
        "--address",
        default="",
        help="Ray cluster that runs the shards, or `auto` (default: a temporary cluster on this "
        "machine)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the folder.

    Raises:
        SpecServeError: an argument is wrong, or the shards cannot start or write.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from rich.console import Console

    from specserve.compare.arguments import only_application
    from specserve.core.new_folder import new_folder

    config = _checked(only_application(args.config))
    out: Path = args.out.absolute()
    if not out.parent.is_dir():
        raise ConfigError("OUT", str(out), "a folder in an existing folder")
    with new_folder(out) as folder, Console(stderr=True).status("loading the shards"):
        _copy_small_files(Path(config.model.path), folder)
        with _cluster(config, args.address):
            _write(config, folder, on_one_node=not args.address)
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    num_shards = config.engine.tensor_parallel_size
    print(f"{num_shards} shard(s), {num_bytes:,} bytes written to {args.out}")
    return 0


def _checked(config: AppConfig) -> AppConfig:
    """The configuration, with the resolved paths of the model and its tokenizer.

    Raises:
        ConfigError: the model is not a local folder, or its weights cannot be divided in advance.
    """
    from specserve.engine.checkpoint import find_checkpoint
    from specserve.engine.weights import own_quantization

    checkpoint = find_checkpoint(config.model)
    if not checkpoint.is_local:
        raise ConfigError("model.path", config.model.path, "a folder of this machine")
    options = config.engine.vllm
    if options.get("load_format", "auto") != "auto":
        allowed = "auto, of the checkpoint that is to be divided"
        raise ConfigError("engine.vllm.load_format", options["load_format"], allowed)
    own = own_quantization(Path(checkpoint.path))
    if options.get("quantization") not in (None, own):
        allowed = f"{own or 'none'}: vLLM quantizes only what it reads from an ordinary checkpoint"
        raise ConfigError("engine.vllm.quantization", options["quantization"], allowed)
    found = {"path": checkpoint.path, "tokenizer": checkpoint.tokenizer}
    return config.model_copy(update={"model": config.model.model_copy(update=found)})


def _copy_small_files(checkpoint: Path, folder: Path) -> None:
    """Copies all files except the weights."""
    for file in checkpoint.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
            shutil.copyfile(file, folder / file.name)


@contextmanager
def _cluster(config: AppConfig, address: str) -> Iterator[None]:
    """Connects to the cluster at ``address``; empty: to a local one with the shards' resources."""
    import ray

    from specserve.cli.cluster import connected

    if address:
        with connected(address):
            yield
        return
    num_shards, placement = config.engine.tensor_parallel_size, config.placement
    ray.init(
        "local",
        num_cpus=num_shards * placement.num_cpus_per_shard,
        resources={name: num_shards * n for name, n in placement.shard_resources.items()},
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield
    finally:
        ray.shutdown()


def _write(config: AppConfig, folder: Path, *, on_one_node: bool) -> None:
    from specserve.engine.llm import shard_bundle
    from specserve.engine.shard_weights import write_shards
    from specserve.serve.placement import reserve

    placement = config.placement
    if on_one_node:
        placement = placement.model_copy(update={"strategy": "PACK"})
    group = asyncio.run(
        reserve(placement, shard_bundle(config), config.engine.tensor_parallel_size)
    )
    write_shards(config, group, folder)
