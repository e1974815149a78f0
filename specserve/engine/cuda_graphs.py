"""CUDA graphs for steps without drafts.

vLLM 0.32 expects every step under speculation to have the longest draft in each request: it rounds
all sizes of graphs to multiples of 1 + that length, and its full graphs are for such steps alone.
Our drafts have any length, and many steps have none; with drafts of up to 16 tokens vLLM computes a
step of one token as one of 17. Here sizes stay as they are, and the full graphs are those of steps
with one token a request. A step with drafts replays the piecewise graph of the next size.

With drafts of one token vLLM's own choice stays: rounding to even sizes costs next to nothing, and
steps in which each request has a draft are frequent.
"""

from __future__ import annotations

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from specserve.core.config import AppConfig
from specserve.engine.sampling import may_step_plainly

_LARGEST = 512
"""vLLM's own limit, in tokens."""


def graph_sizes(config: AppConfig) -> list[int]:
    """Tokens of the steps that get a graph, ascending: vLLM's steps, and the largest batches.

    The largest are a full batch without drafts and a full batch with the longest ones.
    """
    engine = config.engine
    longest = engine.max_num_seqs * (1 + config.num_speculative_tokens)
    limit = min(longest, engine.max_num_batched_tokens, _LARGEST)
    steps = {1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST + 1, 16), engine.max_num_seqs}
    return sorted({size for size in steps if size <= limit} | {limit})


def set_graph_sizes(arguments: AsyncEngineArgs, config: AppConfig) -> None:
    """Sets the sizes, unless the user has chosen some by any of vLLM's options for it."""
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
    """Has a model runner keep the sizes, and capture full graphs of steps without drafts.

    Before vLLM chooses attention and with it the graphs; after that it is too late. Not where
    layers are recurrent: their steps are never taken as without speculation.
    """
    if runner.num_spec_tokens > 1 and may_step_plainly(runner):
        runner.uniform_decode_query_len = 1
        runner.cudagraph_dispatcher.uniform_decode_query_len = 1
