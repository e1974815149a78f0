"""Fixes three defects of vLLM 0.32's sampling on CPU.

1. The rejection sampler copies each request's temperature, top_k and top_p to its draft tokens.
   vLLM's CPU version converts the output to int64 and never copies it back. For any other dtype the
   values stay uninitialised memory, and sampled text has a wrong distribution.
2. In a step without draft tokens, ``top_k`` is applied to zero rows of logits. vLLM's CPU version
   takes the maximum of an empty tensor, which ends the engine.
3. A request in prefill is sampled too, and the token is discarded. vLLM then resets the offset of
   the generator of a request with a ``seed``; a CPU generator has no offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def repair_kernels() -> None:
    """Assigns the replacements to the names that vLLM looks up.

    vLLM's `register_kernels` is not used: it inspects every object of every imported module, and
    fails on some of other packages.
    """
    rejection_sampler.apply_top_k_top_p = _apply_top_k_top_p
    if not HAS_TRITON:  # with it vLLM runs the original kernel, which is right
        rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


@contextmanager
def unused_generators_aside(runner: Any) -> Iterator[None]:
    """Context for a step that removes the generators of requests whose token is discarded.

    Such a row is drawn from the engine's own generator, and vLLM has no generator to reset.
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
    """vLLM's function of this name, which also accepts zero rows."""
    return apply_top_k_top_p(logits, k, p) if len(logits) else logits


def _expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """vLLM's function of this name: repeats ``x[i]`` for every draft token of request ``i``.

    Args:
        x: ``[batch_size]``.
        cu_num_tokens: ``[batch_size]``, cumulative number of draft tokens.
        num_tokens: last value of ``cu_num_tokens``.
        replace_from: value of ``x`` that becomes ``replace_to`` in the result.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return torch.repeat_interleave(replaced, counts.long(), output_size=num_tokens)
