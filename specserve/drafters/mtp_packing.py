"""Packs the weights of an MTP module for its compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.core.types import Float32Array, UInt16Array
from specserve.drafters.latent_attention import LatentAttention
from specserve.drafters.mtp_kernels import MtpKernels, Scales, Weights
from specserve.drafters.mtp_weights import MtpWeights


def kernels_of(config: Any, weights: MtpWeights, attention: LatentAttention) -> MtpKernels | None:
    """The module's kernels; None: torch computes it.

    Kernels are for one CPU thread in float32. They need weights that bfloat16 holds exactly, even
    sizes, no groups of experts and queries without a low rank.

    Args:
        config: transformers' DeepseekV3Config.
        weights: the module's.
        attention: the module's; its cache is shared.
    """
    is_one_thread = weights.device.type == "cpu" and torch.get_num_threads() == 1
    is_plain = config.q_lora_rank is None and (config.n_group or 1) == 1
    sizes = (
        config.vocab_size,
        config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim),
        config.kv_lora_rank + config.qk_rope_head_dim,
        config.v_head_dim,
    )
    is_even = not any(size % 2 for size in sizes)
    if not (is_one_thread and is_plain and is_even and weights.dtype == torch.float32):
        return None
    try:
        packed = _pack(config, weights, attention)
    except _Inexact:
        return None
    scales = Scales(
        float(config.rms_norm_eps),
        float(attention.scale),
        float(config.routed_scaling_factor),
        int(config.num_experts_per_tok),
        bool(config.norm_topk_prob),
    )
    return MtpKernels(packed, scales, attention.cache.numpy())


class _Inexact(Exception):
    """A weight is not a bfloat16 number."""


def _pack(config: Any, weights: MtpWeights, attention: LatentAttention) -> Weights:
    width, vocab, heads = config.hidden_size, config.vocab_size, config.num_attention_heads
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    inner, count = config.moe_intermediate_size, config.n_routed_experts
    shared = inner * config.n_shared_experts
    own, mlp = weights.part("self_attn"), weights.part("mlp")
    up = own.get("kv_b_proj.weight", heads * (nope + value), latent).view(heads, -1, latent)
    experts = [_expert(mlp.part(f"experts.{index}"), width, inner) for index in range(count)]
    shared_gate_up, shared_down = _expert(mlp.part("shared_experts"), width, shared)
    gate_up, down = (np.stack(each) for each in zip(*experts, strict=True))
    return Weights(
        embedding=_bits(weights.embedding(vocab, width)),
        enorm=_floats(weights.get("enorm.weight", width)),
        hnorm=_floats(weights.get("hnorm.weight", width)),
        join=_bits(weights.get("eh_proj.weight", width, 2 * width)),
        input_norm=_floats(weights.get("input_layernorm.weight", width)),
        kv_down=_bits(own.get("kv_a_proj_with_mqa.weight", latent + rope, width)),
        kv_norm=_floats(own.get("kv_a_layernorm.weight", latent)),
        query=_bits(own.get("q_proj.weight", heads * (nope + rope), width)),
        key_up=_bits(up[:, :nope]),
        value_up=_bits(up[:, nope:]),
        out=_bits(own.get("o_proj.weight", width, heads * value)),
        mlp_norm=_floats(weights.get("post_attention_layernorm.weight", width)),
        gate=_floats(mlp.get("gate.weight", count, width)),
        gate_bias=_floats(mlp.get("gate.e_score_correction_bias", count)),
        shared_gate_up=shared_gate_up,
        shared_down=shared_down,
        gate_up=gate_up,
        down=down,
        norm=_floats(weights.get("shared_head.norm.weight", width)),
        head=_bits(weights.head(vocab, width)),
        cos=_floats(attention.cos),
        sin=_floats(attention.sin),
    )


def _expert(weights: MtpWeights, width: int, inner: int) -> tuple[UInt16Array, UInt16Array]:
    """Gate and up ``[2 inner, width]``, and down ``[width, inner]``."""
    gate = weights.get("gate_proj.weight", inner, width)
    up = weights.get("up_proj.weight", inner, width)
    down = weights.get("down_proj.weight", width, inner)
    return _bits(torch.cat([gate, up])), _bits(down)


def _bits(weight: Tensor) -> UInt16Array:
    """A float32 weight as bfloat16 bits. Raises _Inexact."""
    half = weight.bfloat16()
    if not torch.equal(half.float(), weight):
        raise _Inexact
    return half.contiguous().view(torch.int16).numpy().view(np.uint16)


def _floats(weight: Tensor) -> Float32Array:
    return weight.float().contiguous().numpy()
