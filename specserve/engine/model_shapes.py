"""Computes a model's number of parameters and its KV cache size from config.json.

Supports the architectures of DeepSeek-V3 and Llama. Functions raise LookupError if ``config`` lacks
a key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

DEEPSEEK, LLAMA = "DeepseekV3ForCausalLM", "LlamaForCausalLM"

NO_MLA = "VLLM_MLA_DISABLE"
"""vLLM's environment variable for plain attention instead of latent attention (MLA)."""

_WITH_PLAIN = ("deepseek_v2", "deepseek_v3")
_PLAIN_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those of vLLM's kernel on CPU."""
_MAX_PLAIN_CACHE = 2
"""Size of the heads' keys and values, relative to the latent, up to which attention is plain."""

Parameters: TypeAlias = NDArray[np.int64]
"""Numbers of parameters, int64 ``[5]``: routed experts, split among shards; linear layers, split
and copied to each shard; layers that are never quantized, split and copied."""


def _parameters(
    *, routed: int = 0, split: int = 0, whole: int = 0, plain_split: int = 0, plain_whole: int = 0
) -> Parameters:
    return np.array([routed, split, whole, plain_split, plain_whole])


def shard_bytes(
    parameters: Parameters,
    num_shards: int,
    routed_bytes: float,
    linear_bytes: float,
    plain_bytes: float,
) -> int:
    """Bytes of one shard's parameters, from the bytes per parameter of each kind."""
    part = 1 / num_shards
    sizes = [
        part * routed_bytes,
        part * linear_bytes,
        linear_bytes,
        part * plain_bytes,
        plain_bytes,
    ]
    return round(float(parameters @ np.array(sizes)))


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the functions below support the model's architecture."""
    return config.get("architectures") in ([DEEPSEEK], [LLAMA])


def model_parameters(config: Mapping[str, Any]) -> Parameters:
    """Parameters of the model, without an MTP module."""
    hidden: int = config["hidden_size"]
    layers: int = config["num_hidden_layers"]
    num_tables = 1 if config.get("tie_word_embeddings") else 2
    ends = _parameters(plain_split=num_tables * config["vocab_size"] * hidden, plain_whole=hidden)
    if config["architectures"] == [LLAMA]:
        return ends + _llama_layer(config) * layers
    num_dense: int = min(config.get("first_k_dense_replace", 0), layers)
    attention = _latent_attention(config)
    dense = _parameters(split=3 * hidden * config["intermediate_size"])
    return ends + attention * layers + dense * num_dense + _experts(config) * (layers - num_dense)


def mtp_parameters(config: Mapping[str, Any]) -> Parameters:
    """Parameters of DeepSeek-V3's MTP module, with its own embedding and head."""
    hidden = config["hidden_size"]
    ends = _parameters(
        plain_split=2 * config["vocab_size"] * hidden, plain_whole=2 * hidden**2 + 3 * hidden
    )
    return ends + _latent_attention(config) + _experts(config)


def kv_values_per_token(config: Mapping[str, Any], num_shards: int, *, on_cpu: bool = False) -> int:
    """Values that one layer stores for a token in a shard's KV cache."""
    if config["architectures"] == [DEEPSEEK]:
        if on_cpu and is_plain_on_cpu(config, num_shards):
            return _plain_values(config, num_shards)
        return _latent_values(config)
    heads, head_dim = _llama_heads(config)
    return 2 * max(1, heads // num_shards) * head_dim


def is_plain_on_cpu(config: Mapping[str, Any], num_shards: int) -> bool:
    """Whether a model with latent attention (MLA) uses plain attention on CPU.

    MLA stores a latent for each token, which all heads share. It multiplies a head's query with
    latents, which are longer than the head's keys. If a shard has few heads, their keys and values
    need about as much memory, and plain attention over them is faster.

    The user's :data:`NO_MLA` decides if it is set. False if ``config`` lacks a size.
    """
    if chosen := os.environ.get(NO_MLA):
        return chosen != "0"
    if config.get("model_type") not in _WITH_PLAIN:
        return False
    try:
        is_small = _plain_values(config, num_shards) <= _MAX_PLAIN_CACHE * _latent_values(config)
        return is_small and _plain_head_size(config) in _PLAIN_HEAD_SIZES
    except (LookupError, TypeError):
        return False


def names_backend(options: Mapping[str, Any]) -> bool:
    """Whether ``engine.vllm`` names an attention backend, so that attention stays latent."""
    section = options.get("attention_config")
    named = section.get("backend") if isinstance(section, Mapping) else None
    return bool(options.get("attention_backend") or named)


def _latent_values(config: Mapping[str, Any]) -> int:
    return int(config["kv_lora_rank"] + config["qk_rope_head_dim"])


def _plain_values(config: Mapping[str, Any], num_shards: int) -> int:
    return int(2 * _plain_head_size(config) * config["num_attention_heads"] // num_shards)


def _plain_head_size(config: Mapping[str, Any]) -> int:
    """Size of a head's key, to which vLLM pads the value."""
    return int(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])


def _llama_heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Number of KV heads, and the head size."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return config.get("num_key_value_heads") or heads, head_dim


def _llama_layer(config: Mapping[str, Any]) -> Parameters:
    hidden, (kv_heads, head_dim) = config["hidden_size"], _llama_heads(config)
    attention = 2 * hidden * head_dim * (config["num_attention_heads"] + kv_heads)
    feed_forward = 3 * hidden * config["intermediate_size"]
    return _parameters(split=attention + feed_forward, plain_whole=2 * hidden)


def _latent_attention(config: Mapping[str, Any]) -> Parameters:
    """A layer's MLA and norms; every shard has a copy of the projections to the latents."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config.get("q_lora_rank") or 0, config["kv_lora_rank"]
    rope, value = config["qk_rope_head_dim"], config["v_head_dim"]
    query = heads * (config["qk_nope_head_dim"] + rope) * (q_rank or hidden)
    key_value = heads * (config["qk_nope_head_dim"] + value) * kv_rank
    return _parameters(
        split=query + key_value + heads * value * hidden,
        whole=hidden * (q_rank + kv_rank + rope),
        plain_whole=2 * hidden + q_rank + kv_rank,
    )


def _experts(config: Mapping[str, Any]) -> Parameters:
    """A layer's routed and shared experts, and the router with its biases."""
    hidden, routed = config["hidden_size"], config["n_routed_experts"]
    expert = 3 * hidden * config["moe_intermediate_size"]
    return _parameters(
        routed=expert * routed,
        split=expert * (config.get("n_shared_experts") or 0),
        plain_whole=routed * (hidden + 1),
    )
