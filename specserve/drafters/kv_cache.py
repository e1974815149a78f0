"""A KV cache for many texts: each layer's tensors have one row per text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from specserve.core.errors import ConfigError
from specserve.core.types import Int64Array


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one position in one layer: heads, and elements of a head's key and value."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Span:
    """A run of new cache entries of one text.

    Attributes:
        slot: row of the cache.
        start: position of the first of them.
        end: position after the last of them.
        first: the first entry that they may attend to.
    """

    slot: int
    start: int
    end: int
    first: int = 0

    def drafted(self, number: int) -> Span:
        """The entry of draft token ``number``, counted from 1, behind this span."""
        end = self.end + number
        return Span(self.slot, end - 1, end, self.first)


@dataclass(frozen=True, slots=True)
class Packed:
    """New entries of several texts, concatenated without padding.

    Attributes:
        spans: the texts' spans, in order; each in another slot, none empty.
        slots: int64 ``[total]``, each entry's row of the cache.
        positions: int64 ``[total]``, each entry's position in its row.
        lasts: int64 ``[len(spans)]``, index of each span's last entry.
    """

    spans: tuple[Span, ...]
    slots: Tensor
    positions: Tensor
    lasts: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> Self:
        """Packs these spans."""
        sizes = [span.end - span.start for span in spans]
        slots = np.repeat([span.slot for span in spans], sizes)
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        arrays = (slots, positions, np.cumsum(sizes) - 1)
        return cls(tuple(spans), *(torch.from_numpy(array).to(device) for array in arrays))


class KVCache:
    """Keys ``[num_slots, max_tokens, heads, key_dim]`` of each layer, and values alike.

    Positions come before heads, so that one call writes the entries of several texts, and a prefix
    is copied as one block. Unwritten entries are uninitialised and must not be read.

    Args:
        layers: one shape per layer.
        num_slots: texts that it holds.
        max_tokens: positions of each text.
        dtype: type of all entries.
        device: the cache's device.

    Raises:
        ConfigError: the device's memory is too small; says how many bytes are needed.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_tokens = max_tokens
        elements = sum(layer.num_heads * (layer.key_dim + layer.value_dim) for layer in layers)
        num_bytes = num_slots * max_tokens * elements * dtype.itemsize
        check_room(num_slots, max_tokens, num_bytes, device)

        def entries(num_heads: int, dim: int) -> Tensor:
            size = (num_slots, max_tokens, num_heads, dim)
            return torch.empty(size, dtype=dtype, device=device)

        self.keys = [entries(layer.num_heads, layer.key_dim) for layer in layers]
        self.values = [entries(layer.num_heads, layer.value_dim) for layer in layers]

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes new entries of any slots.

        Args:
            layer: the layer's index.
            places: int64 ``[n]``, ``slot * max_tokens + position``.
            keys: ``[n, heads, key_dim]``.
            values: ``[n, heads, value_dim]``.
        """
        self.keys[layer].flatten(0, 1).index_copy_(0, places, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, places, values)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` entries of a slot into another."""
        for entries in (*self.keys, *self.values):
            entries[target, :length] = entries[source, :length]


_SHORT = 256
"""Texts of up to twice so many entries share a batch, whatever their lengths."""

_MAX_GATHERED = 1 << 16
"""Most entries of a batch of several texts, with padding: a copy of them takes memory."""


def similar_lengths(lengths: Int64Array) -> list[Int64Array]:
    """Divides texts into batches that are padded to their longest text.

    In a batch of longer texts, none is more than twice as long as another. So at most half of the
    batch is padding.

    Args:
        lengths: int64 ``[n]``, entries of each text.

    Returns:
        Indices of the texts of each batch; each text is in one.
    """
    rows, batches = np.argsort(lengths, kind="stable"), []
    while len(rows):
        sizes = lengths[rows]
        num_similar = np.searchsorted(sizes, 2 * max(sizes[0], _SHORT), side="right")
        padded = np.arange(1, len(rows) + 1) * sizes
        num_fitting = np.searchsorted(padded, _MAX_GATHERED, side="right")
        size = max(min(num_similar, num_fitting), 1)
        batches.append(rows[:size])
        rows = rows[size:]
    return batches


def check_room(num_slots: int, max_tokens: int, num_bytes: int, device: torch.device) -> None:
    """Raises ConfigError where a cache of ``num_bytes`` is larger than the device's memory."""
    available = _memory_bytes(device)
    if num_bytes > available:
        raise ConfigError(
            "max_texts",
            num_slots,
            f"fewer: {num_slots} texts of {max_tokens} tokens need {num_bytes:,} bytes of "
            f"KV cache, and {device} has {available:,}",
        )


def _memory_bytes(device: torch.device) -> int:
    """The machine's memory, or what is free of this process's share of the GPU's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        part = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free, part - torch.cuda.memory_reserved(device))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
