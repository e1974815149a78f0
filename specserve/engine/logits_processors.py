"""Logits processors for ``typical_p`` and ``watermark`` of Text Generation Inference.

vLLM lacks both parameters. The processors change only a request's last row of logits, so such
requests are decoded without drafts (:mod:`specserve.engine.sampling`). transformers computes them.
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

from specserve.engine.text_request import Parameters
from specserve.sources.controls import SERVER_PREFIX

_TYPICAL = f"{SERVER_PREFIX}typical"
_WATERMARK = f"{SERVER_PREFIX}watermark"

GREEN_SHARE, GREEN_BIAS, HASH_KEY = 0.5, 2.0, 15_485_863
"""Values of Text Generation Inference, so that its watermark detectors work."""


def extra_args(given: Parameters) -> dict[str, Any]:
    """The processors' parameters of a request, for ``SamplingParams.extra_args``."""
    asked: dict[str, Any] = {}
    if given.typical_p is not None:
        asked[_TYPICAL] = [given.top_k or 0, given.top_p or 1.0, given.typical_p]
    if given.watermark:
        asked[_WATERMARK] = True
    return asked


def are_asked_for(params: SamplingParams) -> bool:
    """Whether a request uses one of these processors."""
    given = params.extra_args or {}
    return _TYPICAL in given or _WATERMARK in given


class TypicalSampling(AdapterLogitsProcessor):
    """Applies ``top_k``, ``top_p`` and then typical sampling (arXiv 2202.00666).

    This is the order of Text Generation Inference. vLLM would apply ``top_k`` and ``top_p`` last. A
    request with ``typical_p`` therefore passes them to this processor.
    """

    def is_argmax_invariant(self) -> bool:
        """True: vLLM runs it after the temperature, and only for sampled requests."""
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
    """Raises the logits of a token list that depends on the token before (arXiv 2301.10226)."""

    _processor: WatermarkLogitsProcessor | None = None

    def is_argmax_invariant(self) -> bool:
        """False: vLLM runs it for greedy requests too."""
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
            # On the CPU, where random numbers are equal on all machines.
            self._processor = WatermarkLogitsProcessor(
                logits.shape[-1], "cpu", GREEN_SHARE, GREEN_BIAS, HASH_KEY
            )
        before = torch.tensor([[(output or prompt)[-1]]])
        marked: torch.Tensor = self._processor(before, logits[None])[0]
        return marked


PROCESSORS = (TypicalSampling, Watermark)
