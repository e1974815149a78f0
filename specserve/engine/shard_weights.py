"""Loads a checkpoint into shards once and has each write what it holds, for ``sharded_state``.

A shard writes its weights as they are loaded, before vLLM brings them into the form of its kernels.
vLLM's own ``save_sharded_state`` comes after that: on CPU the weights of linear layers are packed
by then and no longer in the model, and vLLM would load the empty tensors without a word.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from ray.runtime_env import RuntimeEnv
from ray.util.placement_group import PlacementGroup
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import (
    DefaultModelLoader,
    ShardedStateLoader,
    register_model_loader,
)
from vllm.platforms import current_platform

from specserve.core.config import AppConfig
from specserve.core.errors import EngineError, SpecServeError, last_line_of
from specserve.core.openmp import openmp_environment
from specserve.engine.args import served_engine_args
from specserve.engine.cpu.backend import choose_latent_attention
from specserve.engine.weights import Division, own_quantization

_LOAD_FORMAT = "specserve_shard_weights"
_PART_BYTES = 5 << 30
"""Of one file at most, as far as a tensor is not larger."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long the slowest shard took, in seconds.

    Attributes:
        load_s: to load its part of the checkpoint.
        write_s: to write it.
        reload_s: to load it from what it has written.
    """

    load_s: float
    write_s: float
    reload_s: float


class ShardWriter:
    """What vLLM mixes into its workers; the import of this module brings them the loader."""

    def shard_times(self) -> tuple[float, float, float]:
        """This shard's seconds, in the order of :class:`Times`."""
        return _WritingLoader.seconds[-1]


@register_model_loader(_LOAD_FORMAT)
class _WritingLoader(DefaultModelLoader):
    """vLLM's loader, which also writes what it has loaded, and loads that again."""

    seconds: ClassVar[list[tuple[float, float, float]]] = []

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._out = str(extra.pop("out"))
        self._sharded = replace(
            load_config, load_format="sharded_state", model_loader_extra_config={}
        )
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Loads the checkpoint, writes this rank's files, and reads them back."""
        times = [time.perf_counter()]
        super().load_weights(model, model_config)
        times.append(time.perf_counter())
        ShardedStateLoader.save_model(model, self._out, max_size=_PART_BYTES)
        times.append(time.perf_counter())
        written = copy.copy(model_config)
        written.model_weights = self._out
        ShardedStateLoader(self._sharded).load_weights(model, written)
        times.append(time.perf_counter())
        begin, loaded, wrote, end = times
        self.seconds.append((loaded - begin, wrote - loaded, end - wrote))


def write_shards(config: AppConfig, group: PlacementGroup, folder: Path) -> Times:
    """Starts the shards, without an engine, and has them write their weights.

    Args:
        config: the application's configuration; its model is a folder.
        group: a bundle for each shard.
        folder: exists, and is the same on all nodes.

    Raises:
        EngineError: vLLM refuses the checkpoint or an option, or a shard died.
        SpecServeError: a shard's files are not there.
    """
    plain = config.model_copy(update={"speculation": ()})
    served = served_engine_args(plain)
    arguments = replace(
        served,
        load_format=_LOAD_FORMAT,
        model_loader_extra_config={**served.model_loader_extra_config, "out": str(folder)},
        worker_extension_cls=f"{__name__}.{ShardWriter.__name__}",
    )
    try:
        choose_latent_attention(arguments)
        vllm_config = arguments.create_engine_config()
        parallel = vllm_config.parallel_config
        parallel.placement_group = group
        if current_platform.is_cpu():
            environment = openmp_environment(config.placement.num_cpus_per_shard)
            parallel.ray_runtime_env = RuntimeEnv(env_vars=environment)
        executor = parallel.distributed_executor_backend(vllm_config)
    except (ValueError, OSError, RuntimeError) as error:
        raise EngineError(f"the shards did not start: {last_line_of(error)}") from error
    try:
        times = executor.collective_rpc("shard_times")
    finally:
        executor.shutdown()
    num_shards = config.engine.tensor_parallel_size
    for rank in range(num_shards):
        files = list(folder.glob(f"model-rank-{rank}-part-*.safetensors"))
        for file in files:
            file.chmod(0o644)  # as a checkpoint's: others may serve it
        if not files:
            told = f"shard {rank} wrote to a folder of another machine: all nodes need the same"
            raise SpecServeError(f"{folder.parent}: {told}")
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    Division(num_shards, own_quantization(Path(config.model.path)), dtype).write(folder)
    return Times(*(max(each) for each in zip(*times, strict=True)))
