"""Checks that a model's folder fits the engine's options, before the engine starts.

``specserve shard-weights`` writes weights that are already split for the shards, and vLLM's load
format ``sharded_state`` reads them. vLLM does not check the split and copies whatever fits. The
check therefore compares the options with the file that describes the split. Imports no vLLM.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specserve.core.config import AppConfig, EngineConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import DrafterConfig, MtpConfig
from specserve.engine.model_shapes import is_plain_on_cpu, names_backend

_LOAD_FORMATS = ("sharded_state", "runai_streamer_sharded")
"""vLLM's load formats for folders of split weights."""
MARK = "specserve_shards.json"
"""The file that stores a folder's :class:`Division`."""

_EXPERTS_ONLY = "int8_per_channel_weight_only"
_HALVES = ("float16", "bfloat16")
_FIELD = "engine.vllm.load_format"
_INCLUDED_SCALINGS = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn")
"""RoPE scalings that ``max_position_embeddings`` already includes; vLLM adds others itself."""

_COUNTS_OF_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Division:
    """Options that split weights were made for; ``quantization`` empty: not quantized."""

    tensor_parallel_size: int
    quantization: str
    dtype: str
    enable_expert_parallel: bool = False
    expert_placement_strategy: str = "linear"
    num_redundant_experts: int = 0

    def write(self, folder: Path) -> None:
        """Writes the division into ``folder``."""
        (folder / MARK).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def expert_layout(options: dict[str, Any]) -> dict[str, Any]:
    """Options that assign experts to shards, in the order of :class:`Division`, and values."""
    balancing = options.get("eplb_config")
    if not isinstance(balancing, dict):  # vLLM refuses other types
        balancing = {}
    return {
        "enable_expert_parallel": options.get("enable_expert_parallel", False),
        "expert_placement_strategy": options.get("expert_placement_strategy", "linear"),
        "eplb_config.num_redundant_experts": balancing.get("num_redundant_experts", 0),
    }


def own_quantization(folder: Path) -> str:
    """The quantization method that a checkpoint's config.json names; empty: none."""
    return str((_card(folder).get("quantization_config") or {}).get("quant_method") or "")


def check_weights(config: AppConfig, folder: str, *, on_cpu: bool) -> None:
    """Checks a local model folder against the engine's sizes, load format and quantization.

    Models on the hub are not checked.

    Raises:
        ConfigError: split weights are for other options, or lack the weights of a draft source;
            the quantization is for experts and the model has none; ``max_model_len`` exceeds the
            model's positions; the shards do not divide the attention heads; or a CPU does not
            support the KV cache dtype of latent attention, or adapters for a model with experts.
    """
    if not Path(folder).is_absolute():
        return
    card = _card(Path(folder))
    if "hf_overrides" not in config.engine.vllm:
        text = card["text_config"] if isinstance(card.get("text_config"), dict) else card
        _check_sizes(config.engine, text)
        if on_cpu:
            _check_cpu(config.engine, text)
    if config.engine.vllm.get("quantization") == _EXPERTS_ONLY and "expert" not in json.dumps(card):
        allowed = f"not for {config.model.path}: it quantizes experts only, and the model has none"
        raise ConfigError("engine.vllm.quantization", _EXPERTS_ONLY, allowed)
    found = _read(Path(folder), config.model.path)
    load_format = config.engine.vllm.get("load_format", "auto")
    is_divided = load_format in _LOAD_FORMATS
    if is_divided and found is None:
        allowed = f"only with a folder that `specserve shard-weights` made (it has a {MARK})"
        raise ConfigError(_FIELD, load_format, allowed)
    if found is not None and not is_divided:
        allowed = f"{_LOAD_FORMATS[0]}, for which {config.model.path} was made"
        raise ConfigError(_FIELD, load_format, allowed)
    if found is not None:
        _check_division(config, found, card)
        _check_sources(config)


def _card(folder: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return card


def _check_sizes(engine: EngineConfig, card: dict[str, Any]) -> None:
    """Checks sizes that vLLM refuses only when it loads the model."""
    num_heads = card.get("num_attention_heads")
    if isinstance(num_heads, int) and num_heads % engine.tensor_parallel_size:
        allowed = f"a divisor of the model's {num_heads} attention heads"
        raise ConfigError("engine.tensor_parallel_size", engine.tensor_parallel_size, allowed)
    longest = card.get("max_position_embeddings")
    if not isinstance(longest, int) or "model_max_length" in card or not _includes_scaling(card):
        return
    if engine.max_model_len > longest and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        allowed = f"at most {longest}, the model's max_position_embeddings"
        raise ConfigError("engine.max_model_len", engine.max_model_len, allowed)


def _check_cpu(engine: EngineConfig, card: dict[str, Any]) -> None:
    """Checks options with which vLLM starts on CPU, but fails at every request."""
    options = engine.vllm
    kind = options.get("kv_cache_dtype", "auto")
    is_latent = card.get("kv_lora_rank") and str(card.get("model_type")).startswith("deepseek")
    is_plain = not names_backend(options) and is_plain_on_cpu(card, engine.tensor_parallel_size)
    if kind != "auto" and is_latent and not is_plain:
        allowed = "auto: on CPU latent attention has no other KV cache"
        raise ConfigError("engine.vllm.kv_cache_dtype", kind, allowed)
    has_experts = any(isinstance(card.get(key), int) and card[key] for key in _COUNTS_OF_EXPERTS)
    if options.get("enable_lora") and has_experts and not options.get("lora_target_modules"):
        allowed = "false: on CPU vLLM has no adapters for a model with experts"
        raise ConfigError("engine.vllm.enable_lora", True, allowed)


def _includes_scaling(card: dict[str, Any]) -> bool:
    """Whether ``max_position_embeddings`` already includes the scaling of positions."""
    scaling = card.get("rope_scaling") or card.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(each, dict) for each in scaling.values()):
        return False  # each kind of layer has its own scaling
    return scaling.get("rope_type", scaling.get("type", "default")) in _INCLUDED_SCALINGS


def _check_division(config: AppConfig, made_for: Division, card: dict[str, Any]) -> None:
    engine = config.engine
    made = f"what {config.model.path} was made for"
    if engine.tensor_parallel_size != made_for.tensor_parallel_size:
        raise ConfigError(
            "engine.tensor_parallel_size",
            engine.tensor_parallel_size,
            f"{made_for.tensor_parallel_size}, {made}",
        )
    quantization = engine.vllm.get("quantization")
    if quantization not in (None, made_for.quantization):
        allowed = f"{made_for.quantization or 'none'}, {made}"
        raise ConfigError("engine.vllm.quantization", quantization, allowed)
    for key, value in expert_layout(engine.vllm).items():
        allowed = getattr(made_for, key.rpartition(".")[2])
        if value != allowed:
            raise ConfigError(f"engine.vllm.{key}", value, f"{allowed}, {made}")
    if not _has_dtype(engine.dtype, made_for.dtype, card):
        raise ConfigError("engine.dtype", engine.dtype, f"{made_for.dtype}, {made}")


def _has_dtype(dtype: str, made_for: str, card: dict[str, Any]) -> bool:
    """Whether ``engine.dtype`` means the dtype of a folder's weights.

    vLLM's ``auto`` is the checkpoint's dtype. For float32 it is float16 or bfloat16, by the device.
    """
    if dtype != "auto":
        return dtype == made_for
    own = card.get("dtype") or card.get("torch_dtype")
    return made_for == own if own in _HALVES else made_for in _HALVES


def _check_sources(config: AppConfig) -> None:
    for index, source in enumerate(config.speculation):
        field = f"speculation.{index}"
        if isinstance(source, DrafterConfig) and source.placement == "in_engine":
            allowed = f"actor or beside_rank_0, with {_FIELD}: {_LOAD_FORMATS[0]}"
            raise ConfigError(f"{field}.placement", source.placement, allowed)
        if isinstance(source, MtpConfig) and not source.model:
            allowed = (
                f"the folder of an MTP module (`specserve split-mtp`): {config.model.path} has none"
            )
            raise ConfigError(f"{field}.model", source.model, allowed)


def _read(folder: Path, value: str) -> Division | None:
    try:
        content = json.loads((folder / MARK).read_text(encoding="utf-8"))
        return Division(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise ConfigError("model.path", value, f"a folder with a readable {MARK}") from None
