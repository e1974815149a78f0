from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu.rotary import use_vector_rotary

SIZE, MAX_POSITION = 32, 256

native = DeepseekScalingRotaryEmbedding.forward_native


@pytest.fixture(autouse=True)
def _replaced() -> Iterator[None]:
    use_vector_rotary()
    yield
    DeepseekScalingRotaryEmbedding.forward_native = native


def embedding(*, is_neox: bool = False, rotated: int = SIZE) -> Any:
    with set_current_vllm_config(VllmConfig()):
        return DeepseekScalingRotaryEmbedding(
            SIZE, rotated, MAX_POSITION // 2, 10000.0, is_neox, 2.0, torch.float32
        )


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, and slices of queries of three heads and of latent rows, as the model has."""
    query = torch.randn(num_tokens, 3, 16 + SIZE)[..., 16:]
    key = torch.randn(num_tokens, 40 + SIZE).unsqueeze(1)[..., 40:]
    return torch.randint(0, MAX_POSITION // 2, (num_tokens,)), query, key


@pytest.mark.parametrize("offset", [None, 7])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_attention_scores_are_those_of_vllms_order(num_tokens: int, offset: int | None) -> None:
    rotary, given = embedding(), inputs(num_tokens)
    offsets = None if offset is None else torch.full_like(given[0], offset)
    query, key = rotary.forward_native(*given, offsets)
    vllms_query, vllms_key = native(rotary, *given, offsets)
    for each, vllms in ((query, vllms_query), (key, vllms_key)):
        in_order = torch.cat((vllms[..., ::2], vllms[..., 1::2]), dim=-1)
        torch.testing.assert_close(each, in_order)
    scores = torch.einsum("nhd,mkd->hnm", query, key)
    torch.testing.assert_close(scores, torch.einsum("nhd,mkd->hnm", vllms_query, vllms_key))


@pytest.mark.parametrize(("is_neox", "rotated"), [(True, SIZE), (False, SIZE // 2)])
def test_other_embeddings_stay_vllms(is_neox: bool, rotated: int) -> None:
    rotary, given = embedding(is_neox=is_neox, rotated=rotated), inputs(4)
    for each, vllms in zip(rotary.forward_native(*given), native(rotary, *given), strict=True):
        assert torch.equal(each, vllms)
