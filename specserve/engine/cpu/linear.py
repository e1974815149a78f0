"""Runs linear layers on CPU in bfloat16 or float32, whichever a measurement at load shows faster.

Without AVX512-BF16, AMX or Arm's BF16, most matrix products are slower in bfloat16 than in float32.
The ratio depends on the shape. A layer that computes in float32 keeps float32 weights, in twice the
memory, and rounds the result once, as bfloat16 hardware does. Latent attention and a separate
output head also keep their bfloat16 weights, which other code reads.
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

in_float32: dict[tuple[int, ...], bool] = {}
"""Whether layers compute in float32 in this process, by the shape of their weights."""

_ROWS = (8, 128)
"""Tokens of a decode step and of a prefill step."""
_MAX_WEIGHTS = 1 << 22
"""Most weights that are measured. A run takes milliseconds, and no core's cache holds so many."""
_NUM_RUNS = 5
_MEASURED_S = 0.03
"""Shortest measurement in seconds, for one shape and one number of rows."""
_MAX_TIME_RATIO = 0.8
"""Float32 needs twice the memory. It is used below this ratio of its time to bfloat16's time."""


def use_fastest_linear() -> None:
    """Lets vLLM's linear layers use the faster dtype for their shape, in this process."""
    utils.dispatch_cpu_unquantized_gemm = _dispatch_fastest


def use_fastest_linear_in(model: torch.nn.Module) -> None:
    """Does the same for loaded layers that vLLM leaves to torch, those of latent attention."""
    for layer in model.modules():
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            weight = getattr(layer, "weight", None)
            if (
                isinstance(weight, torch.Tensor)
                and _is_bfloat16_matrix(weight)
                and is_float32_faster(*weight.shape, _leave_to_torch)
            ):
                _compute_in_float32(layer, weight)


@cache
def is_float32_faster(
    num_outputs: int, num_inputs: int, dispatch: Callable[[Any, bool], None]
) -> bool:
    """Whether a layer of this shape is clearly faster in float32; measures it once.

    The result is the geometric mean of the time ratios of decode and prefill. ``dispatch`` sets up
    the bfloat16 layer, as vLLM's function does.
    """
    num_outputs = min(num_outputs, max(1, _MAX_WEIGHTS // num_inputs))
    layer: Any = torch.nn.Linear(num_inputs, num_outputs, bias=False, dtype=torch.bfloat16)
    weight = layer.weight.detach().float()
    dispatch(layer, False)
    ratio = 1.0
    for num_rows in _ROWS:
        x = torch.ones(num_rows, num_inputs, dtype=torch.bfloat16)
        float32_s, bfloat16_s = _seconds(
            partial(_linear, weight, x, weight, None),
            partial(layer.cpu_linear, x, layer.weight, None),
        )
        ratio *= float32_s / bfloat16_s
    logger.info("Linear %d to %d: float32/bfloat16 time %.2f", num_inputs, num_outputs, ratio**0.5)
    return bool(ratio**0.5 < _MAX_TIME_RATIO)


def _seconds(*calls: Callable[[], object]) -> list[float]:
    """Shortest CPU time of each call in this thread, in seconds, measured in turns.

    Drafters and other engines may load on the same CPUs meanwhile. CPU time excludes the time in
    which the thread waits for them.
    """
    timers = [Timer(call, timer=time.thread_time) for call in calls]
    runs = [[each.timeit(1) for each in timers]]  # warm-up
    until = time.perf_counter() + _MEASURED_S
    while len(runs) <= _NUM_RUNS or time.perf_counter() < until:
        runs.append([each.timeit(1) for each in timers])
    return [min(times) for times in zip(*runs[1:], strict=True)]


def _leave_to_torch(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _dispatch_fastest(layer: Any, remove_weight: bool) -> None:
    """Replaces vLLM's `dispatch_cpu_unquantized_gemm`: chooses how a layer computes."""
    is_lookup = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    may_change = not is_lookup and _is_bfloat16_matrix(layer.weight)
    is_faster = may_change and is_float32_faster(*layer.weight.shape, _dispatch)
    if may_change:
        in_float32[tuple(layer.weight.shape)] = is_faster
    if not is_faster:
        _dispatch(layer, remove_weight)
        return
    _compute_in_float32(layer, layer.weight)
    if remove_weight:
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def _is_bfloat16_matrix(weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and weight.dtype == torch.bfloat16 and not weight.is_meta


def _compute_in_float32(layer: Any, weight: torch.Tensor) -> None:
    layer.cpu_linear = partial(_linear, weight.detach().float())


def _linear(
    weight: torch.Tensor, x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Linear layer in float32: ``x`` [..., in], ``weight`` [out, in]; the dtype of ``x``."""
    float32_bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight, float32_bias).to(x.dtype)
