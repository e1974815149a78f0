"""Linear layers on CPU, in bfloat16 or in float32: as is faster here, by a measurement at load.

Without AVX512-BF16, AMX or Arm's BF16, most matrix products are slower in bfloat16 than in float32,
by how much depends on the shape. A layer that computes in float32 keeps its weights so, in twice
the memory, and rounds the result once, as bfloat16 hardware does. Latent attention and a separate
output head keep their bfloat16 weights beside them, which others read too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache, partial
from timeit import Timer
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

logger = logging.getLogger(__name__)

_dispatch = utils.dispatch_cpu_unquantized_gemm

_ROWS = (8, 128)
"""Tokens of a step that decodes, and of one that reads a prompt."""
_MOST_WEIGHTS = 1 << 22
"""As many are measured at most: a run takes milliseconds, and no cache of a core holds them."""
_NUM_RUNS = 5
_MEASURED_S = 0.03
"""Of a shape and number of rows at least so much."""
_WORTH = 0.8
"""Float32 takes twice the memory: it is worth that where it takes at most this part of the time."""


def use_fastest_linear() -> None:
    """Has vLLM's linear layers compute in this process as is faster for their shape."""
    utils.dispatch_cpu_unquantized_gemm = _dispatch_fastest


def use_fastest_linear_in(model: torch.nn.Module) -> None:
    """The same for the loaded layers that vLLM leaves to torch: those of latent attention."""
    for layer in model.modules():
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            weight = getattr(layer, "weight", None)
            if (
                isinstance(weight, torch.Tensor)
                and _is_concerned(weight)
                and is_float32_faster(*weight.shape, _leave_to_torch)
            ):
                _compute_in_float32(layer, weight)


@cache
def is_float32_faster(
    num_outputs: int, num_inputs: int, dispatch: Callable[[Any, bool], None]
) -> bool:
    """Whether a layer of this shape takes clearly less time in float32; measures it once.

    Decoding and reading a prompt count the same, by the ratios of their times. ``dispatch``
    chooses how a layer computes in bfloat16, as vLLM's function does.
    """
    num_outputs = min(num_outputs, max(1, _MOST_WEIGHTS // num_inputs))
    layer: Any = torch.nn.Linear(num_inputs, num_outputs, bias=False, dtype=torch.bfloat16)
    weight = layer.weight.detach().float()
    dispatch(layer, False)
    ratio = 1.0
    for num_rows in _ROWS:
        x = torch.ones(num_rows, num_inputs, dtype=torch.bfloat16)
        in_float32, in_bfloat16 = _seconds(
            partial(_linear, weight, x, weight, None),
            partial(layer.cpu_linear, x, layer.weight, None),
        )
        ratio *= in_float32 / in_bfloat16
    logger.info("Linear %d to %d: float32 takes %.2f", num_inputs, num_outputs, ratio**0.5)
    return bool(ratio**0.5 < _WORTH)


def _seconds(*calls: Callable[[], object]) -> list[float]:
    """The shortest run of each, in turns, on one thread.

    While the engine loads, drafters and other engines do so on the same CPUs, too. What a thread
    computes is counted then, and not what it waits for.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timers = [Timer(call, timer=time.thread_time) for call in calls]
    try:
        runs = [[each.timeit(1) for each in timers]]  # which warms up
        until = time.perf_counter() + _MEASURED_S
        while len(runs) <= _NUM_RUNS or time.perf_counter() < until:
            runs.append([each.timeit(1) for each in timers])
    finally:
        torch.set_num_threads(num_threads)
    return [min(times) for times in zip(*runs[1:], strict=True)]


def _leave_to_torch(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _dispatch_fastest(layer: Any, remove_weight: bool) -> None:
    """vLLM's function of this name: chooses how a layer computes."""
    is_lookup = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    may_change = not is_lookup and _is_concerned(layer.weight)
    if not (may_change and is_float32_faster(*layer.weight.shape, _dispatch)):
        _dispatch(layer, remove_weight)
        return
    _compute_in_float32(layer, layer.weight)
    if remove_weight:
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def _is_concerned(weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and weight.dtype == torch.bfloat16 and not weight.is_meta


def _compute_in_float32(layer: Any, weight: torch.Tensor) -> None:
    layer.cpu_linear = partial(_linear, weight.detach().float())


def _linear(
    weight: torch.Tensor, x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` [..., in] times ``weight`` [out, in] in float32, in the type of ``x``."""
    in_float32 = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight, in_float32).to(x.dtype)
