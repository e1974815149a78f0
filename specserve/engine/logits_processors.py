"""Sampling parameters of Text Generation Inference that vLLM does not have.

``typical_p`` and ``watermark`` work on the last logits of a request, so such requests are decoded
without drafts (:mod:`specserve.engine.sampling`). The computing is transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from specserve.engine.text_request import TextRequest
from specserve.sources.controls import SERVER_PREFIX

_TYPICAL = f"{SERVER_PREFIX}typical"
_WATERMARK = f"{SERVER_PREFIX}watermark"

GREEN_SHARE, GREEN_BIAS, HASH_KEY = 0.5, 2.0, 15_485_863
"""Text Generation Inference's: who looks for its watermark finds this one."""


def extra_args(request: TextRequest) -> dict[str, Any]:
    """What tells the processors of a request, for ``SamplingParams.extra_args``."""
    asked: dict[str, Any] = {}
    if request.typical_p is not None:
        asked[_TYPICAL] = [request.top_k, request.top_p, request.typical_p]
    if request.watermark:
        asked[_WATERMARK] = True
    return asked


def are_asked_for(params: SamplingParams) -> bool:
    """Whether a request has one of these parameters."""
    given = params.extra_args or {}
    return _TYPICAL in given or _WATERMARK in given


class TypicalSampling(AdapterLogitsProcessor):
    """Keeps the most typical tokens (arXiv 2202.00666) of those that ``top_k`` and ``top_p`` keep.

    vLLM would apply these two afterwards, to what is left; a request with ``typical_p`` has them
    here instead, in the order of Text Generation Inference.
    """

    def is_argmax_invariant(self) -> bool:
        """vLLM's method: True has it run after the temperature, and for sampled requests alone."""
        return True

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[Sequence[int], torch.Tensor], torch.Tensor] | None:
        """vLLM's method."""
        asked = (params.extra_args or {}).get(_TYPICAL)
        if asked is None:
            return None
        top_k, top_p, typical_p = asked
        warpers = LogitsProcessorList()
        if top_k:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
        warpers.append(TypicalLogitsWarper(typical_p))

        def keep(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            kept: torch.Tensor = warpers(None, logits[None])[0]
            return kept

        return keep


class Watermark(AdapterLogitsProcessor):
    """Favours the tokens of a list that the token before tells (arXiv 2301.10226)."""

    _processor: WatermarkLogitsProcessor | None = None

    def is_argmax_invariant(self) -> bool:
        """vLLM's method: greedy requests are marked, too."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[Sequence[int], Sequence[int], torch.Tensor], torch.Tensor] | None:
        """vLLM's method."""
        return self._mark if _WATERMARK in (params.extra_args or {}) else None

    def _mark(
        self, prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        if self._processor is None:
            # On the host, whose random numbers are the same on every machine.
            self._processor = WatermarkLogitsProcessor(
                logits.shape[-1], "cpu", GREEN_SHARE, GREEN_BIAS, HASH_KEY
            )
        before = torch.tensor([[(output or prompt)[-1]]])
        marked: torch.Tensor = self._processor(before, logits[None])[0]
        return marked


PROCESSORS = (TypicalSampling, Watermark)
