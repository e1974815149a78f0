"""DeepSeek-V3's multi-token prediction module (arXiv 2412.19437, section 2.2) as vLLM runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.drafters.experts import mixture_of_experts
from specserve.drafters.kv_cache import Packed
from specserve.drafters.latent_attention import LatentAttention
from specserve.drafters.mtp_weights import MtpWeights
from specserve.drafters.ops import laid_out


class MtpModule:
    """Predicts the token after next from the target's hidden state and the next token.

    Entry i of its cache combines the hidden state of position i with token i + 1. From the second
    draft token on, the hidden state is the module's own previous result.

    Args:
        config: transformers' DeepseekV3Config.
        weights: weights of the module.
        num_slots: texts that the cache holds.
        max_entries: entries of each text.
    """

    def __init__(self, config: Any, weights: MtpWeights, num_slots: int, max_entries: int) -> None:
        self.dtype, self.device = weights.dtype, weights.device
        width, vocab = config.hidden_size, config.vocab_size
        self._eps = config.rms_norm_eps
        self._embedding = weights.embedding(vocab, width)
        self._enorm = weights.get("enorm.weight", width)
        self._hnorm = weights.get("hnorm.weight", width)
        self._join = laid_out(weights.get("eh_proj.weight", width, 2 * width))
        self._input_norm = weights.get("input_layernorm.weight", width)
        self._mlp_norm = weights.get("post_attention_layernorm.weight", width)
        self._experts = mixture_of_experts(config, weights.part("mlp"))
        self._norm = weights.get("shared_head.norm.weight", width)
        self._head = laid_out(weights.head(vocab, width))
        # Last, because it checks its cache against the memory that is left.
        self.attention = LatentAttention(config, weights.part("self_attn"), num_slots, max_entries)

    def forward(
        self, states: Tensor, next_tokens: Tensor, packed: Packed, num_wanted: int
    ) -> Tensor:
        """Computes new entries and writes them into the cache.

        The module has one layer, so entries depend on others only through the cache. All that
        follows the write is computed only for the wanted results.

        Args:
            states: ``[total, hidden_size]``, hidden states after the final norm: the target's, or
                this method's own result for the position before.
            next_tokens: int64 ``[total]``, the tokens at the next positions.
            packed: the entries' places in the cache.
            num_wanted: number of leading spans whose last entry's result is wanted.

        Returns:
            ``[num_wanted, hidden_size]``, after the final norm.
        """
        embedded = F.embedding(next_tokens, self._embedding)
        # At position 0 the module was trained without the next token.
        embedded.masked_fill_((packed.positions == 0).unsqueeze(1), 0)
        both = torch.cat([self._rms(embedded, self._enorm), self._rms(states, self._hnorm)], 1)
        x = F.linear(both, self._join)
        normed = self._rms(x, self._input_norm)
        self.attention.write(normed, packed)
        if not num_wanted:
            return x[:0]
        lasts, spans = packed.lasts[:num_wanted], packed.spans[:num_wanted]
        x = x[lasts]
        x += self.attention.read(normed[lasts], spans, packed.positions[lasts])
        x += self._experts(self._rms(x, self._mlp_norm))
        return self._rms(x, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]``, the logits of n rows of :meth:`forward`'s result."""
        return F.linear(hidden, self._head)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)
