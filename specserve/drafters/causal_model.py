"""A causal language model of transformers that computes over slots of a KV cache."""

from __future__ import annotations

from typing import Any, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specserve.core.errors import ConfigError, reason_of
from specserve.drafters.attention import NAME, Step, UnsupportedAttention, cached_step
from specserve.drafters.kv_cache import KVCache, LayerShape, Packed, Span
from specserve.drafters.ops import laid_out

_PROBE_TOKENS = 24

_UNREADABLE = (
    *(OSError, ValueError, TypeError, ImportError),
    *(SafetensorError, StrictDataclassError),
)
"""What transformers raises if a checkpoint's files are missing or wrong, or if its quantization
needs another package. The last two derive only from Exception: a damaged weights file, and a
config.json field with a value of the wrong type."""


class CausalModel:
    """Any causal model whose attention goes through transformers' ``AttentionInterface``.

    Attributes:
        dtype: type of the weights and the cache.
        layers: shape of a position in the cache, one per layer.
        vocab_size: number of logits per token.
        max_positions: longest text that the model supports, in tokens.
    """

    def __init__(self, model: Any, layers: list[LayerShape]) -> None:
        config = model.config.get_text_config()
        self._model = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.layers = layers
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings

    @classmethod
    def load(cls, path: str, dtype: torch.dtype, device: torch.device, revision: str = "") -> Self:
        """Loads a checkpoint from a folder or from the hub, and checks its results with attention
        over slots.

        Raises:
            ConfigError: no such checkpoint, or the model is not one of plain causal attention.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, revision=revision or None, trust_remote_code=False
            )
            model = model.to(device).eval()
            embedding = model.get_input_embeddings().weight
            for module in model.modules():
                if type(module) is nn.Linear and module.weight is not embedding:
                    module.weight.data = laid_out(module.weight.data)
            return cls.attach(model)
        except UnsupportedAttention as error:
            allowed = f"a model of plain causal attention; this one has {error}"
            raise ConfigError("model", path, allowed) from None
        except _UNREADABLE as error:
            allowed = f"a causal model's checkpoint ({reason_of(error)})"
            raise ConfigError("model", path, allowed) from error

    @classmethod
    @torch.inference_mode()
    def attach(cls, model: Any) -> Self:
        """Replaces a loaded model's attention by attention over slots.

        Raises:
            UnsupportedAttention: the model's results change, or its config rules it out.
        """
        _check_config(model.config.get_text_config())
        ids = torch.arange(_PROBE_TOKENS, device=model.device) * 7919 % model.config.vocab_size
        wanted = model(input_ids=ids[None], use_cache=False).logits[0, -1]
        model.set_attn_implementation(NAME)
        shapes: dict[int, LayerShape] = {}

        def note(layer: int, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
            shapes[layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2])
            return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])

        first = torch.zeros_like(ids[:1])
        _forward(model, ids[:1], first, note, first)
        num_layers = model.config.get_text_config().num_hidden_layers
        if sorted(shapes) != list(range(num_layers)):
            raise UnsupportedAttention("layers without transformers' attention interface")
        attached = cls(model, [shapes[layer] for layer in range(num_layers)])
        found = attached._in_pieces(ids)
        # bfloat16 rounds by a few percent of the largest logit; a wrong result differs by more.
        # `not ... <=` also refuses NaN.
        limit = 0.1 * wanted.abs().max()
        if found.shape != wanted.shape or not (found - wanted).abs().max() <= limit:
            raise UnsupportedAttention("other state than keys and values, or positions of its own")
        return attached

    def forward(self, ids: Tensor, cache: KVCache, packed: Packed, num_wanted: int) -> Tensor:
        """Computes new tokens of several texts, and writes their keys and values into the cache.

        Args:
            ids: int64 ``[n]``.
            cache: holds all entries before each span.
            packed: the tokens' places in the cache.
            num_wanted: number of leading spans whose last token's logits are wanted.

        Returns:
            logits ``[num_wanted, vocab_size]``.
        """
        step = cached_step(cache, packed)
        return _forward(self._model, ids, packed.positions, step, packed.lasts[:num_wanted])

    def _in_pieces(self, ids: Tensor) -> Tensor:
        """The last token's logits, computed in two pieces and beside another text."""
        cache = KVCache(self.layers, 2, len(ids), self.dtype, self.device)
        half = len(ids) // 2
        self.forward(ids[:half], cache, Packed.of([Span(1, 0, half)], self.device), 0)
        packed = Packed.of([Span(1, half, len(ids)), Span(0, 0, half)], self.device)
        both = torch.cat([ids[half:], ids[:half].flip(0)])
        return self.forward(both, cache, packed, 1)[0]


def _forward(model: Any, ids: Tensor, positions: Tensor, step: Step, wanted: Tensor) -> Tensor:
    logits: Tensor = model(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=wanted,
        step=step,
    ).logits[0]
    return logits


def _check_config(config: Any) -> None:
    """Refuses models whose results differ only in texts longer than the probe."""
    layer_types = getattr(config, "layer_types", None) or ()
    if getattr(config, "sliding_window", None) and not layer_types:
        raise UnsupportedAttention("sliding_window")
    for kind in layer_types:
        if kind != "full_attention":
            raise UnsupportedAttention(f"layers of {kind}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise UnsupportedAttention(f"{rope['rope_type']} positions, which change with the length")
