"""CUDA graphs for steps without drafts.

Under speculation vLLM 0.32 expects the longest draft for every request in every step. It rounds all
graph sizes to multiples of 1 + that length and captures full graphs only for such steps. With
drafts of up to 16 tokens it computes a step of one token as one of 17. specserve's drafts have any
length, and many steps have none. So graph sizes are not rounded here, and full graphs are captured
for steps with one token a request. A step with drafts replays the next larger piecewise graph.

If the longest draft has one token, vLLM's graphs are kept. Rounding to even sizes costs almost
nothing, and steps with a draft for every request are frequent.
"""

from __future__ import annotations

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from specserve.core.config import AppConfig
from specserve.engine.sampling import may_step_plainly

_LARGEST = 512
"""vLLM's own limit, in tokens."""


def graph_sizes(config: AppConfig) -> list[int]:
    """Graph sizes in tokens, ascending: vLLM's own sizes and those of full batches.

    Full batches are ``max_num_seqs`` requests without drafts, and with the longest drafts. As in
    vLLM, graphs are up to twice as long, for steps that also read a short prompt.
    """
    engine = config.engine
    longest = engine.max_num_seqs * (1 + config.num_speculative_tokens)
    limit = min(2 * longest, engine.max_num_batched_tokens, _LARGEST)
    full = {engine.max_num_seqs, longest, limit}
    steps = {1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST + 1, 16)} | full
    return sorted(size for size in steps if size <= limit)


def set_graph_sizes(arguments: AsyncEngineArgs, config: AppConfig) -> None:
    """Sets the graph sizes, unless the user has set any of vLLM's options for them."""
    compilation = arguments.compilation_config
    chosen = (
        arguments.cudagraph_capture_sizes,
        arguments.max_cudagraph_capture_size,
        compilation.cudagraph_capture_sizes,
        compilation.max_cudagraph_capture_size,
    )
    if not any(chosen) and arguments.performance_mode != "interactivity":
        arguments.cudagraph_capture_sizes = graph_sizes(config)


def capture_plain_steps(runner: Any) -> None:
    """Makes a model runner capture full graphs for steps without drafts, at unrounded sizes.

    Call it before vLLM chooses attention backends and graphs. It skips models with recurrent
    layers, whose steps never run without speculation.
    """
    if runner.num_spec_tokens > 1 and may_step_plainly(runner):
        runner.uniform_decode_query_len = 1
        runner.cudagraph_dispatcher.uniform_decode_query_len = 1
