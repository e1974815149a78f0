"""What a shard and a drafter would keep in memory, by their checkpoints and before they start.

Imports nothing of vLLM and reads no weights. What is counted is what lasts: weights and KV cache.
Activations, CUDA graphs and NCCL's buffers come on top; in practice some GB a GPU.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.core.config import AppConfig
from specserve.core.errors import PlacementError
from specserve.core.source_config import DrafterConfig, DraftModelConfig, MtpConfig
from specserve.engine.checkpoint import find_checkpoint, folder_or_id
from specserve.engine.model_shapes import (
    FP8_BLOCK_BYTES,
    is_known,
    kv_values_per_token,
    model_parameters,
    mtp_parameters,
)

_VLLM_OPTIONS = ("quantization", "kv_cache_dtype", "hf_overrides", "cpu_offload_gb")
"""Options of ``engine.vllm`` that change how much memory is taken, in ways not worked out here."""


class NoEstimateError(Exception):
    """What is missing for an estimate, in words."""


class _Card(dict[str, Any]):
    """A model's config.json."""

    def __missing__(self, key: str) -> Any:
        raise NoEstimateError(f"config.json has no {key}")

    @property
    def is_fp8(self) -> bool:
        """Whether linear layers are block FP8."""
        return (self.get("quantization_config") or {}).get("quant_method") == "fp8"


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """What one shard keeps.

    Attributes:
        weights_bytes: of the model, and of what drafts in the engine.
        kv_token_bytes: of a token in its KV cache.
        max_tokens: longest text that a request may have.
    """

    weights_bytes: int
    kv_token_bytes: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """What a drafter keeps, in bytes."""

    weights_bytes: int
    kv_cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.weights_bytes + self.kv_cache_bytes


def shard_memory(config: AppConfig) -> ShardMemory:
    """Estimates one of an application's shards.

    Raises:
        ConfigError: a model is neither a folder nor a hub id.
        NoEstimateError: the model is on the hub or of an architecture that is not known here, or
            an option of ``engine.vllm`` makes something else of its weights.
    """
    changed = next((name for name in _VLLM_OPTIONS if name in config.engine.vllm), None)
    if changed:
        raise NoEstimateError(f"engine.vllm.{changed} changes it")
    folder = find_checkpoint(config.model).path
    card = _card(folder)
    num_shards = config.engine.tensor_parallel_size
    value_bytes = 4 if config.engine.dtype == "float32" else 2  # vLLM's auto makes 2 of 4
    weights = _weights_bytes(folder, card, num_shards, value_bytes)
    values = kv_values_per_token(card, num_shards) * int(card["num_hidden_layers"])
    for source in config.speculation:
        if isinstance(source, DrafterConfig) and source.placement == "in_engine":
            its_weights, its_values = _in_engine(source, card, num_shards, value_bytes)
            weights, values = weights + its_weights, values + its_values
    return ShardMemory(weights, values * value_bytes, _max_tokens(config, card))


def drafter_memory(config: AppConfig, source: DraftModelConfig | MtpConfig) -> DrafterMemory:
    """Estimates one of a source's drafters.

    Raises:
        ConfigError: a model is neither a folder nor a hub id.
        NoEstimateError: as above.
    """
    model = source.model or config.model.path
    card = _card(folder_or_id(model, f"speculation.{source.kind}.model"))
    max_tokens = _max_tokens(config, _card(find_checkpoint(config.model).path))
    is_float32 = source.dtype == "float32" or (source.dtype == "auto" and not source.num_gpus)
    value_bytes = 4 if is_float32 else 2
    if isinstance(source, MtpConfig):
        parameters, num_layers = mtp_parameters(card), 1
    else:
        parameters, num_layers = model_parameters(card), int(card["num_hidden_layers"])
    values = kv_values_per_token(card, 1) * num_layers
    return DrafterMemory(
        parameters.total * value_bytes, source.max_texts * max_tokens * values * value_bytes
    )


def check_shard(config: AppConfig, shard: ShardMemory, gpu_bytes: float) -> int:
    """Tokens that a shard's KV cache has room for on a GPU, where only what is estimated takes any.

    Raises:
        PlacementError: the weights do not fit, or leave too little for a longest request.
    """
    engine = config.engine
    kv_bytes = engine.kv_cache_memory_bytes
    share = engine.gpu_memory_utilization
    if kv_bytes:  # vLLM's rule: then that is of no account
        share = 1 - sum(source.num_gpus for source in config.beside_rank_0.values())
    left_bytes = share * gpu_bytes - shard.weights_bytes
    if left_bytes < kv_bytes:
        cache = f" and KV cache of {in_words(kv_bytes)}" if kv_bytes else ""
        raise PlacementError(
            f"a shard's weights of {in_words(shard.weights_bytes)}{cache} do not fit into "
            f"{share:g} x {in_words(gpu_bytes)} of a GPU"
        )
    num_tokens = int((kv_bytes or left_bytes) // shard.kv_token_bytes)
    if num_tokens < shard.max_tokens:
        raise PlacementError(
            f"a shard's KV cache has room for {num_tokens:,} tokens, and one request may have "
            f"{shard.max_tokens:,}: engine.max_model_len has to be lower"
        )
    return num_tokens


def check_drafter(source: DrafterConfig, drafter: DrafterMemory, gpu_bytes: float) -> None:
    """Raises PlacementError where a drafter does not fit into its part of a GPU."""
    part_bytes = min(source.num_gpus, 1.0) * gpu_bytes
    if drafter.total_bytes > part_bytes:
        raise PlacementError(
            f"the drafter's weights of {in_words(drafter.weights_bytes)} and its KV cache of "
            f"{in_words(drafter.kv_cache_bytes)} do not fit into {in_words(part_bytes)} of a GPU"
        )


def in_words(num_bytes: float) -> str:
    """A number of bytes in words."""
    unit, size = ("GiB", 1 << 30) if num_bytes >= 1 << 30 else ("MiB", 1 << 20)
    return f"{num_bytes / size:.1f} {unit}"


def _in_engine(
    source: DrafterConfig, card: _Card, num_shards: int, value_bytes: int
) -> tuple[int, int]:
    """Bytes of its weights in a shard, and values of a token in the shard's KV cache."""
    if isinstance(source, DraftModelConfig):
        folder = folder_or_id(source.model, f"speculation.{source.kind}.model")
        card = _card(folder)
        values = kv_values_per_token(card, num_shards) * int(card["num_hidden_layers"])
        return _weights_bytes(folder, card, num_shards, value_bytes), values
    linear_bytes = FP8_BLOCK_BYTES if card.is_fp8 else value_bytes
    weights = mtp_parameters(card).shard_bytes(num_shards, linear_bytes, value_bytes)
    return weights, kv_values_per_token(card, num_shards)


def _weights_bytes(folder: str, card: _Card, num_shards: int, value_bytes: int) -> int:
    """A shard's part of a model's weights: by the shapes, and else by what the files hold."""
    if card.get("quantization_config") and not card.is_fp8:
        return round(_stored_bytes(Path(folder)) / num_shards)
    linear_bytes = FP8_BLOCK_BYTES if card.is_fp8 else value_bytes
    return model_parameters(card).shard_bytes(num_shards, linear_bytes, value_bytes)


def _stored_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's tensors, by its index, and else by its files."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return int(index["metadata"]["total_size"])
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    if not sizes:
        raise NoEstimateError("the weights are quantized, and their files are not here")
    return sum(sizes)


def _card(folder: str) -> _Card:
    """The config.json of a model of a known architecture."""
    if not Path(folder).is_absolute():
        raise NoEstimateError(f"{folder} is on the hub")
    try:
        card = _Card(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise NoEstimateError(f"{folder} has no readable config.json") from None
    if not is_known(card):
        raise NoEstimateError(f"the architecture {card.get('architectures')} is not known here")
    return card


def _max_tokens(config: AppConfig, card: _Card) -> int:
    return config.engine.max_model_len or int(card["max_position_embeddings"])
