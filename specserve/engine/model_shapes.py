"""Computes a model's number of parameters and its KV cache size from config.json.

Supports the architectures of DeepSeek-V3 and Llama. Functions raise LookupError if ``config`` lacks
a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

DEEPSEEK, LLAMA = "DeepseekV3ForCausalLM", "LlamaForCausalLM"

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


def kv_values_per_token(config: Mapping[str, Any], num_shards: int) -> int:
    """Values that one layer stores for a token in a shard's KV cache."""
    if config["architectures"] == [DEEPSEEK]:  # all heads share the latent
        return int(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    heads, head_dim = _llama_heads(config)
    return 2 * max(1, heads // num_shards) * head_dim


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
