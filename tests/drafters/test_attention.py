"""Attention over slots, row by row and padded, against plain attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specserve.drafters import kv_cache
from specserve.drafters.attention import Padded, RowByRow
from specserve.drafters.kv_cache import KVCache, LayerShape, Span

SPANS = [
    [Span(2, 0, 1)],
    [Span(1, 7, 8), Span(0, 3, 4), Span(2, 0, 1)],
    [Span(2, 0, 9), Span(0, 5, 6), Span(1, 4, 7)],
    [Span(1, 8, 10), Span(0, 0, 2), Span(2, 2, 3)],
]


def filled_cache() -> KVCache:
    cache = KVCache([LayerShape(2, 8, 6)] * 2, 3, 10, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for entries in (*cache.keys, *cache.values):
        entries.normal_(generator=generator)
    return cache


def plain_attention(query: Tensor, cache: KVCache, spans: list[Span], scale: float) -> Tensor:
    """Reference: one query at a time; query head h of 6 reads KV head h // 3 of 2."""
    rows, n = [], 0
    for span in spans:
        for position in range(span.start, span.end):
            keys = cache.keys[1][span.slot, : position + 1].repeat_interleave(3, 1)
            values = cache.values[1][span.slot, : position + 1].repeat_interleave(3, 1)
            weights = torch.einsum("hd,thd->ht", query[:, n] * scale, keys).softmax(-1)
            rows.append(torch.einsum("ht,thd->hd", weights, values))
            n += 1
    return torch.stack(rows)


@pytest.mark.parametrize("short", [1, 256])
@pytest.mark.parametrize("reader", [RowByRow, Padded])
@pytest.mark.parametrize("spans", SPANS)
def test_each_token_attends_to_its_text_up_to_itself(
    reader: type[RowByRow | Padded], spans: list[Span], short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_SHORT", short)
    cache = filled_cache()
    for span in spans:  # entries after a text may be anything
        for entries in (*cache.keys, *cache.values):
            entries[span.slot, span.end :] = torch.nan
    num_tokens = sum(span.end - span.start for span in spans)
    query = torch.randn(6, num_tokens, 8, generator=torch.Generator().manual_seed(1))
    found = reader(cache, spans).attend(1, query, 0.3)
    torch.testing.assert_close(found, plain_attention(query, cache, spans, 0.3))


def test_a_prefix_is_copied_in_every_layer() -> None:
    cache = filled_cache()
    cache.copy(0, 2, 4)
    for entries in (*cache.keys, *cache.values):
        assert torch.equal(entries[2, :4], entries[0, :4])
        assert not torch.equal(entries[2, 4:], entries[0, 4:])
