"""Estimates the memory of a shard and of a drafter from config.json, before they start.

Imports nothing of vLLM and reads no weights. The estimate covers weights, KV cache and the
verification of drafts. Activations, CUDA graphs and NCCL's buffers need some GB more on each GPU.
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
from specserve.engine.model_shapes import (
    Parameters,
    is_known,
    kv_values_per_token,
    model_parameters,
    mtp_parameters,
    names_backend,
    shard_bytes,
)

_VLLM_OPTIONS = ("kv_cache_dtype", "hf_overrides", "cpu_offload_gb")
"""Options of ``engine.vllm`` whose effect on memory this module does not compute."""

_LINEAR_AND_EXPERTS = ("fp8_per_block", "fp8_per_tensor", "fp8_per_channel")
_EXPERTS = ("int8_per_channel_weight_only",)
"""Values of ``quantization`` with which vLLM quantizes at load, to one byte a parameter. The scales
of blocks, rows and columns take up to 0.1 % more and are not counted."""

MAX_STEP_DRAFT_TOKENS = 1024
"""Most draft tokens of a step. Their logits take memory from the KV cache, 2.2 GB for a vocabulary
of 152,000, and in a step of so many tokens each further one takes time."""

_VERIFICATION_BYTES = 12
"""Bytes of a draft token in vLLM's rejection sampler for each token of the vocabulary, beside the
model's own logits: two copies of the logits and the probabilities, in float32."""


class NoEstimateError(Exception):
    """No estimate is possible; the message says what is missing."""


class _Card(dict[str, Any]):
    """A model's config.json with its folder. A missing key raises NoEstimateError."""

    def __init__(self, folder: Path) -> None:
        super().__init__(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        self._folder = folder

    def __missing__(self, key: str) -> Any:
        raise NoEstimateError(f"config.json has no {key}")

    @property
    def quantization(self) -> str:
        """The checkpoint's quantization method; empty: none."""
        return str((self.get("quantization_config") or {}).get("quant_method") or "")

    def stored_bytes(self) -> int:
        """Bytes of all tensors, from the index or else from file sizes; 0: no files here."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            index = (self._folder / "model.safetensors.index.json").read_text(encoding="utf-8")
            return int(json.loads(index)["metadata"]["total_size"])
        return sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))

    def linear_bytes(self) -> float:
        """Bytes of one parameter of a quantized linear layer, with its share of the scales."""
        if self.quantization == "fp8":
            return 1
        section = self["quantization_config"]
        groups = section.get("config_groups") or {"": {"weights": section}}  # compressed-tensors'
        weights = next(iter(groups.values())).get("weights") or {}
        bits, group_size = weights.get("num_bits", weights.get("bits")), weights.get("group_size")
        if not bits or len(groups) > 1:
            raise NoEstimateError("config.json does not say how many bits all weights have")
        return float(bits / 8 + (2 / group_size if group_size and group_size > 0 else 0))


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """Memory of one shard in bytes, for the model and for draft models in the engine."""

    weights_bytes: int
    kv_token_bytes: int
    verification_bytes: int


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """Memory of one drafter in bytes."""

    weights_bytes: int
    kv_cache_bytes: int


def shard_memory(config: AppConfig, *, on_cpu: bool = False) -> ShardMemory:
    """Estimates the memory of one shard of an application.

    Raises:
        NoEstimateError: the model has no config.json on this machine, its architecture is unknown,
            or an option of ``engine.vllm`` changes the memory in a way that is not computed.
    """
    options = config.engine.vllm
    changed = next((name for name in _VLLM_OPTIONS if name in options), None)
    num_shards = config.engine.tensor_parallel_size
    value_bytes = 4 if config.engine.dtype == "float32" else 2  # auto halves float32
    card = _card(config.model.path)
    quantization = options.get("quantization")
    can_tell = quantization in (None, card.quantization, *_LINEAR_AND_EXPERTS, *_EXPERTS)
    if changed or not can_tell:
        raise NoEstimateError(f"engine.vllm.{changed or 'quantization'} changes it")
    parameters = model_parameters(card)
    may_be_plain = on_cpu and not names_backend(options)
    layer_values = kv_values_per_token(card, num_shards, on_cpu=may_be_plain)
    values = layer_values * card["num_hidden_layers"]
    weights = 0
    for source in config.speculation:
        if not isinstance(source, DrafterConfig) or source.placement != "in_engine":
            continue
        if isinstance(source, DraftModelConfig):
            draft = _card(source.model)
            weights += _weights_bytes(draft, model_parameters(draft), num_shards, value_bytes)
            values += kv_values_per_token(draft, num_shards) * draft["num_hidden_layers"]
        else:
            parameters += mtp_parameters(card)
            values += layer_values
    weights += _weights_bytes(card, parameters, num_shards, value_bytes, quantization)
    logits = 0
    if config.has_sources:
        engine, longest = config.engine, config.num_speculative_tokens
        most = most_draft_tokens(engine.max_num_seqs, engine.max_num_batched_tokens, longest)
        logits = most * card["vocab_size"]
    to_verify = logits * (value_bytes + _VERIFICATION_BYTES)
    return ShardMemory(weights, values * value_bytes, to_verify)


def most_draft_tokens(num_requests: int, num_tokens: int, max_draft_len: int) -> int:
    """The most draft tokens that a step of ``num_tokens`` tokens verifies.

    Of each request's tokens in the step, one is not a draft token.
    """
    fitting = num_tokens * max_draft_len // (max_draft_len + 1)
    return min(num_requests * max_draft_len, fitting, MAX_STEP_DRAFT_TOKENS)


def drafter_memory(config: AppConfig, source: DraftModelConfig | MtpConfig) -> DrafterMemory:
    """Estimates the memory of one drafter of a source.

    If an MTP module's folder is not on this machine, the target model's sizes are used.

    Raises:
        NoEstimateError: as :func:`shard_memory`.
    """
    is_float32 = source.dtype == "float32" or (source.dtype == "auto" and not source.num_gpus)
    value_bytes = 4 if is_float32 else 2
    if isinstance(source, MtpConfig):
        is_here = source.model and Path(source.model).is_dir()
        card = _card(source.model if is_here else config.model.path)
        parameters, num_layers = mtp_parameters(card), 1
    else:
        card = _card(source.model)
        parameters, num_layers = model_parameters(card), int(card["num_hidden_layers"])
    text_bytes = _max_tokens(config) * kv_values_per_token(card, 1) * num_layers * value_bytes
    return DrafterMemory(int(parameters.sum()) * value_bytes, source.max_texts * text_bytes)


def check_shard(config: AppConfig, shard: ShardMemory, gpu_bytes: float) -> int:
    """Tokens that fit into a shard's KV cache on a GPU, by the estimate.

    Raises:
        PlacementError: the weights do not fit, or the longest request does not fit beside them.
    """
    engine = config.engine
    kv_bytes = engine.kv_cache_memory_bytes
    share = engine.gpu_memory_utilization
    if kv_bytes:  # then vLLM ignores gpu_memory_utilization
        share = 1 - sum(source.num_gpus for source in config.beside_rank_0.values())
    to_verify = shard.verification_bytes
    left_bytes = share * gpu_bytes - shard.weights_bytes - to_verify
    if left_bytes < kv_bytes:
        cache = f" and KV cache of {in_words(kv_bytes)}" if kv_bytes else ""
        drafts = f" and {in_words(to_verify)} to verify drafts" if to_verify else ""
        raise PlacementError(
            f"a shard's weights of {in_words(shard.weights_bytes)}{cache}{drafts} do not fit into "
            f"{share:g} x {in_words(gpu_bytes)} of a GPU"
        )
    num_tokens = int((kv_bytes or left_bytes) // shard.kv_token_bytes)
    if num_tokens < _max_tokens(config):
        raise PlacementError(
            f"a shard's KV cache has room for {num_tokens:,} tokens, and one request may have "
            f"{_max_tokens(config):,}: engine.max_model_len has to be lower"
        )
    return num_tokens


def check_drafter(source: DrafterConfig, drafter: DrafterMemory, gpu_bytes: float) -> None:
    """Raises PlacementError if a drafter does not fit into its share of a GPU."""
    part_bytes = min(source.num_gpus, 1.0) * gpu_bytes
    if drafter.weights_bytes + drafter.kv_cache_bytes > part_bytes:
        raise PlacementError(
            f"the drafter's weights of {in_words(drafter.weights_bytes)} and its KV cache of "
            f"{in_words(drafter.kv_cache_bytes)} do not fit into {in_words(part_bytes)} of a GPU"
        )


def in_words(num_bytes: float) -> str:
    """Formats a number of bytes in GiB or MiB."""
    unit, size = ("GiB", 1 << 30) if num_bytes >= 1 << 30 else ("MiB", 1 << 20)
    return f"{num_bytes / size:.1f} {unit}"


def _weights_bytes(
    card: _Card,
    parameters: Parameters,
    num_shards: int,
    value_bytes: int,
    quantization: str | None = None,
) -> int:
    """Bytes of a model's parameters in a shard.

    ``quantization`` is vLLM's option for a checkpoint that is not quantized. If a checkpoint is
    quantized, but not in FP8, the size of its files is used where they exist.
    """
    if card.quantization not in ("", "fp8") and (stored_bytes := card.stored_bytes()):
        return round(stored_bytes / num_shards)
    linear_bytes = routed_bytes = float(value_bytes)
    if card.quantization:
        linear_bytes = routed_bytes = card.linear_bytes()
    elif quantization in _LINEAR_AND_EXPERTS:
        linear_bytes = routed_bytes = 1
    elif quantization in _EXPERTS:
        routed_bytes = 1
    return shard_bytes(parameters, num_shards, routed_bytes, linear_bytes, value_bytes)


def _card(folder: str) -> _Card:
    """The config.json of a model of a known architecture."""
    try:
        card = _Card(Path(folder))
    except (OSError, ValueError, TypeError):
        needed = "put the model's config.json into a folder, and name that folder as its path"
        raise NoEstimateError(f"there is no {folder}/config.json here: {needed}") from None
    if not is_known(card):
        raise NoEstimateError(f"the architecture {card.get('architectures')} is not known here")
    return card


def _max_tokens(config: AppConfig) -> int:
    if config.engine.max_model_len:
        return config.engine.max_model_len
    return int(_card(config.model.path)["max_position_embeddings"])
