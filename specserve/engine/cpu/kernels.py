"""What is wrong on CPU in vLLM 0.32's sampling, put right.

The rejection sampler spreads each request's temperature, top_k and top_p over the request's draft
tokens. vLLM's CPU version converts the output to int64 first and never copies it back, so that for
any other type the values stay uninitialised memory, and sampled text is drawn from a distribution
that nobody asked for. Greedy decoding does not use it. On GPU the kernel is right and untouched.

In a step without any draft token, ``top_k`` is applied to no logits at all, and vLLM's CPU version
takes the maximum of nothing, which ends the engine.

A request whose prompt is not read to its end is sampled too, and the token thrown away. vLLM then
sets the generator of a request with a ``seed`` back by an offset, which those on CPU do not have.

The function that ranks tokens among log-probabilities is compiled at its first use, which holds all
requests up for ten seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def repair_kernels() -> None:
    """Puts the replacements in place, by the names under which vLLM looks them up.

    Not through vLLM's `register_kernels`, which looks into every object of every imported module
    and stumbles over some that are not vLLM's.
    """
    rejection_sampler.apply_top_k_top_p = _apply_top_k_top_p
    sampler.batched_count_greater_than = _count_at_least
    if not HAS_TRITON:  # with it vLLM runs the original kernel, which is right
        rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


@contextmanager
def unused_generators_aside(runner: Any) -> Iterator[None]:
    """Within it, a step samples without the generators of requests whose token it throws away.

    Such a row is drawn from the engine's own generator, and vLLM finds none to set back.
    """
    generators: dict[int, torch.Generator] = runner.input_batch.generators
    unused = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    aside = {row: generators.pop(row) for row in unused.tolist() if row in generators}
    try:
        yield
    finally:
        generators.update(aside)


def _apply_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """vLLM's function of this name, for any number of rows."""
    return apply_top_k_top_p(logits, k, p) if len(logits) else logits


def _count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """vLLM's `batched_count_greater_than`: how many of ``x[i]`` are at least ``values[i, 0]``."""
    return (x >= values).sum(-1)


def _expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """vLLM's function of this name: each ``x[i]`` once for every draft token of request ``i``.

    Args:
        x: ``[batch_size]``.
        cu_num_tokens: ``[batch_size]``, cumulative number of draft tokens.
        num_tokens: the last one of these.
        replace_from: value of ``x`` that is answered as ``replace_to``.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return torch.repeat_interleave(replaced, counts.long(), output_size=num_tokens)
