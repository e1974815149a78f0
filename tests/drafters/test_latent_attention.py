"""Our absorbed attention against the expanded one of transformers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from specserve.drafters import kv_cache
from specserve.drafters.kv_cache import Packed, Span
from specserve.drafters.latent_attention import (
    LatentAttention,
    attend_in_batches,
    attend_on_cpu,
)
from tests.drafters.given_weights import GivenWeights, randomise, small_config

CPU = torch.device("cpu")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 1.3,
    "beta_fast": 32,
    "beta_slow": 1,
}
CONFIGS: list[dict[str, Any]] = [
    {"rope_parameters": YARN},
    {"rope_parameters": YARN, "q_lora_rank": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
]


class Both:
    """Our layer with 3 slots of 128 entries and transformers' layer, with the same weights."""

    def __init__(self, config: Any) -> None:
        config._attn_implementation = "sdpa"
        self._theirs = DeepseekV3Attention(config, 0).eval()
        self._rotary = DeepseekV3RotaryEmbedding(config)
        randomise(self._theirs)
        weights: Any = GivenWeights(self._theirs.state_dict())
        self.ours = LatentAttention(config, weights, 3, 128)
        self.ours.cache.fill_(torch.nan)  # unwritten entries must not be read

    def expected(self, x: Tensor, begin: int = 0) -> Tensor:
        """Transformers' results for a text ``[tokens, hidden_size]`` from position ``begin`` on."""
        positions = torch.arange(begin, begin + len(x)).unsqueeze(0)
        rotary = self._rotary(x, positions)
        out: Tensor = self._theirs(x.unsqueeze(0), rotary, attention_mask=None)[0][0]
        return out

    def forward(self, x: Tensor, *spans: Span) -> Tensor:
        """Our results for the last entry of each span, ``[len(spans), hidden_size]``."""
        packed = Packed.of(spans, CPU)
        self.ours.write(x, packed)
        return self.ours.read(x[packed.lasts], spans, packed.positions[packed.lasts])


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(100, 48, generator=torch.Generator().manual_seed(1))


def close(ours: Tensor, expected: Tensor) -> bool:
    return torch.allclose(ours, expected, atol=2e-5) and bool(expected.std() > 0.1)


@torch.inference_mode()
@pytest.mark.parametrize("changes", CONFIGS)
def test_absorbed_attention_equals_the_expanded_one(
    changes: dict[str, Any], inputs: Tensor
) -> None:
    both = Both(small_config(**changes))
    each = [both.forward(inputs[i : i + 1], Span(1, i, i + 1)) for i in range(100)]
    assert close(torch.cat(each), both.expected(inputs))


@torch.inference_mode()
def test_entries_may_come_one_by_one_or_in_pieces(inputs: Tensor) -> None:
    both = Both(small_config(**CONFIGS[0]))
    bounds = [0, 1, 2, 40, 41, 99, 100]
    lasts = [
        both.forward(inputs[start:end], Span(0, start, end)) for start, end in pairwise(bounds)
    ]
    ends = torch.tensor(bounds[1:]) - 1
    assert close(torch.cat(lasts), both.expected(inputs)[ends])


@torch.inference_mode()
def test_texts_of_one_call_do_not_see_each_other(inputs: Tensor) -> None:
    both = Both(small_config(**CONFIGS[0]))
    both.forward(inputs[:30], Span(2, 0, 30))
    packed = torch.cat([inputs[50:57], inputs[30:31], inputs[60:90]])
    out = both.forward(packed, Span(0, 0, 7), Span(2, 30, 31), Span(1, 0, 30))
    assert close(out[0], both.expected(inputs[50:57])[-1])
    assert close(out[1], both.expected(inputs[:31])[-1])
    assert close(out[2], both.expected(inputs[60:90])[-1])


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_attend_on_cpu_equals_attend_in_batches(num_threads: int) -> None:
    query, entries = torch.randn(4, 28), torch.randn(50, 28)
    span = Span(0, 49, 50)
    (elsewhere,) = attend_in_batches(query[None], entries[None], [span], 20, 0.3)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    here = attend_on_cpu(query, entries, 20, 0.3)
    torch.set_num_threads(before)
    assert elsewhere.shape == (4, 20)
    assert torch.allclose(here, elsewhere, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("most", [1, 100, 1 << 16])
def test_texts_of_any_lengths_are_attended_in_batches(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_MAX_GATHERED", most)
    cache = torch.randn(5, 700, 28)
    spans = [Span(3, 9, 10), Span(0, 699, 700), Span(2, 5, 40, 3), Span(4, 0, 1), Span(1, 19, 20)]
    for span in spans:  # unwritten entries must not be read
        cache[span.slot, : span.first] = cache[span.slot, span.end :] = torch.nan
    queries = torch.randn(len(spans), 4, 28)
    found = attend_in_batches(queries, cache, spans, 20, 0.3)
    for own, span, out in zip(queries, spans, found, strict=True):
        expected = attend_on_cpu(own, cache[span.slot, span.first : span.end], 20, 0.3)
        assert torch.allclose(out, expected, atol=1e-5)


@torch.inference_mode()
def test_a_text_may_begin_later_than_at_position_0(inputs: Tensor) -> None:
    both = Both(small_config(**CONFIGS[0]))
    out = both.forward(inputs[:20], Span(0, 70, 90, 70))
    assert close(out[0], both.expected(inputs[:20], begin=70)[-1])
