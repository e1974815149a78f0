"""Splits a checkpoint's weights for the load format ``sharded_state``.

Each shard loads its part and writes it before vLLM converts weights for its kernels. vLLM's own
``save_sharded_state`` runs after the conversion. On CPU the weights of linear layers are then
packed outside the model, and vLLM would later load the empty tensors without an error.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import (
    DefaultModelLoader,
    ShardedStateLoader,
    register_model_loader,
)
from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, EngineError, SpecServeError, last_line_of
from specserve.engine.args import served_engine_args
from specserve.engine.llm import placed_config, prepare_environment
from specserve.engine.weights import Division, expert_layout, own_quantization

_LOAD_FORMAT = "specserve_shard_weights"
_PART_BYTES = 5 << 30
"""Largest file in bytes; a larger tensor gets a file of its own."""


class LoaderExtension:
    """Worker extension without methods; it makes vLLM's workers import this module's loader."""


@register_model_loader(_LOAD_FORMAT)
class _WritingLoader(DefaultModelLoader):
    """vLLM's loader, which also writes the loaded weights."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._out = str(extra.pop("out"))
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Loads the checkpoint and writes this rank's files.

        Raises:
            ConfigError: config.json ties an lm_head that differs from the embedding.
        """
        super().load_weights(model, model_config)
        # vLLM loads an lm_head that the checkpoint stores, and ties it after the loading. From
        # ``sharded_state`` it loads one tensor for both.
        num_loaded = len(list(model.parameters()))
        maybe_retie_word_embeddings(model, model_config)
        is_tied = len(list(model.parameters())) < num_loaded
        if model_config.word_embeddings_untied_by_checkpoint and not is_tied:
            allowed = "false in config.json, because lm_head differs from the embedding"
            raise ConfigError("tie_word_embeddings", True, allowed)
        ShardedStateLoader.save_model(model, self._out, max_size=_PART_BYTES)


def write_shards(config: AppConfig, group: PlacementGroup, folder: Path) -> None:
    """Starts the shards without an engine. Each writes its weights into ``folder``.

    Args:
        config: the application's configuration; its model is a folder.
        group: a bundle for each shard.
        folder: an existing folder that all nodes share.

    Raises:
        EngineError: vLLM refuses the checkpoint or an option, or a shard died.
        SpecServeError: a shard's files are missing.
    """
    plain = config.model_copy(update={"speculation": ()})
    prepare_environment(plain)
    served = served_engine_args(plain)
    arguments = replace(
        served,
        load_format=_LOAD_FORMAT,
        model_loader_extra_config={**served.model_loader_extra_config, "out": str(folder)},
        worker_extension_cls=f"{__name__}.{LoaderExtension.__name__}",
    )
    try:
        vllm_config = placed_config(plain, arguments, group)
        executor = vllm_config.parallel_config.distributed_executor_backend(vllm_config)
    except (ValueError, OSError, RuntimeError, RayError) as error:
        raise EngineError(f"the shards did not start: {last_line_of(error)}") from error
    executor.shutdown()
    num_shards = config.engine.tensor_parallel_size
    for rank in range(num_shards):
        files = list(folder.glob(f"model-rank-{rank}-part-*.safetensors"))
        for file in files:
            file.chmod(0o644)  # readable for other users, like a checkpoint
        if not files:
            reason = f"shard {rank} wrote to a folder of another machine: all nodes need the same"
            raise SpecServeError(f"{folder.parent}: {reason}")
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    quantization = own_quantization(Path(config.model.path))
    experts = expert_layout(config.engine.vllm).values()
    Division(num_shards, quantization, dtype, *experts).write(folder)
