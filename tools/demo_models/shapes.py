"""The two demo models' sizes, and their Hugging Face configs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tools.demo_models.tokenizer import BOS_ID, END_ID, PAD_ID

VOCAB_SIZE = 4096
MAX_TOKENS = 4096
"""Context length of both models."""


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's options to extend the original context (arXiv 2309.00071)."""

    factor: float = 4.0
    original_max_position_embeddings: int = 1024
    mscale_all_dim: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class BaseShape:
    """Sizes of the DeepSeek-V3 model; names as in its config.json.

    vLLM's CPU kernel for MLA is compiled for a latent cache of 512 + 64 values per token.
    """

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    moe_intermediate_size: int = 96
    n_routed_experts: int = 12
    num_experts_per_tok: int = 2
    num_attention_heads: int = 4
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 48
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Yarn = Yarn()

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: the parts without and with rotation."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def hf_config(self) -> dict[str, Any]:
        """config.json in DeepSeek-V3's terms, with one MTP layer."""
        return {
            **asdict(self),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "ep_size": 1,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": MAX_TOKENS,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": None,
            "rope_interleave": True,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "mscale": 1.0,
                **asdict(self.rope_scaling),
            },
            "routed_scaling_factor": 1.0,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """Sizes of the Llama draft model; names as in its config.json. Embedding and head are tied."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 128
    num_hidden_layers: int = 4
    intermediate_size: int = 384
    num_attention_heads: int = 4
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 500_000.0

    def hf_config(self) -> dict[str, Any]:
        """config.json in Llama's terms."""
        return {
            **asdict(self),
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": MAX_TOKENS,
            "mlp_bias": False,
            "num_key_value_heads": self.num_attention_heads,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
