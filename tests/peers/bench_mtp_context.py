"""Time of one new token in the MTP layer, by context length, compared with transformers' layer.

    python tests/peers/bench_mtp_context.py [--model configs/models/demo-base] [--threads 2]

The latent cache is filled with noise beforehand. ``attention``: latent attention alone. Our side
absorbs its matrices, transformers expands the cache. ``layer``: transformers' decoder layer.
``call``: a drafter's whole call with slots, norms, experts and the head. The competitors take
turns, and the tables have medians. The peer's cache is written in place like ours. transformers'
own cache would be copied in each call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
)

from specserve.compare.machine import circumstances
from specserve.drafters.base import Row
from specserve.drafters.kv_cache import Packed, Span
from specserve.drafters.mtp import MtpDrafter
from specserve.drafters.mtp_files import find_mtp
from specserve.drafters.mtp_module import MtpModule
from specserve.drafters.mtp_weights import MtpWeights
from specserve.wire.messages import Card
from tests.peers.tables import print_rows

CONTEXTS = (100, 1_000, 4_000, 32_000)
BATCHES = (1, 8)
SECONDS = 2.0
"""Time limit for the turns of one context and batch. There are at least two turns."""

MAX_TURNS = 100


class Ours:
    """The demo MTP module with a cache of noise."""

    def __init__(self, model: Path, config: Any) -> None:
        files = find_mtp(str(model), "--model")
        weights = MtpWeights(files, torch.float32, torch.device("cpu"))
        longest = config.max_position_embeddings
        self._module = MtpModule(config, weights, max(BATCHES), longest)
        self._width = config.hidden_size
        self._card = Card(
            kind="mtp",
            model=str(model),
            vocab_size=config.vocab_size,
            tokenizer="",
            hidden_size=config.hidden_size,
            max_tokens=longest,
        )
        self._module.attention.cache.normal_()

    def attention(self, context: int, batch: int) -> Callable[[], object]:
        spans = [Span(slot, context - 1, context) for slot in range(batch)]
        packed = Packed.of(spans, torch.device("cpu"))
        x = torch.randn(batch, self._width)

        def function() -> Tensor:
            attention = self._module.attention
            attention.write(x, packed)
            return attention.read(x, packed.spans, packed.positions)

        return function

    def call(self, context: int, batch: int) -> Callable[[], object]:
        """A call that drafts one token for texts with one new entry."""
        drafter = MtpDrafter(self._module, self._card, max(BATCHES))
        tokens = np.arange(context + 1, dtype=np.int32) % self._card.vocab_size
        rows = []
        for number in range(batch):
            key = (b"", number)
            table = drafter._slots  # a prefill of so many tokens would take minutes
            slot = table.open(key, number)
            assert slot is not None
            table.extend(slot, tokens[1:])
            rows.append(
                Row(
                    key=key,
                    salt=number,
                    start=context,
                    tokens=tokens[-1:],
                    states_start=context - 1,
                    states=np.ones((1, self._width), np.float32),
                    max_draft_tokens=1,
                )
            )
        assert all(answer.tokens for answer in drafter.draft(rows))
        return lambda: drafter.draft(rows)


class PlacedCache:
    """A cache for transformers that writes the last entry in place and returns views."""

    def __init__(self, batch: int, context: int, config: Any) -> None:
        self._latents = torch.randn(batch, 1, context, config.kv_lora_rank)
        self._keys = torch.randn(batch, 1, context, config.qk_rope_head_dim)

    def update(self, latents: Tensor, keys: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self._latents[:, :, -1:] = latents
        self._keys[:, :, -1:] = keys
        return self._latents, self._keys


class Theirs:
    """transformers' decoder layer of the same shape, with random weights."""

    def __init__(self, config: Any) -> None:
        config._attn_implementation = "sdpa"
        config._experts_implementation = "grouped_mm"  # the fastest one
        self._config = config
        self._layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers - 1).eval()
        for parameter in self._layer.parameters():
            parameter.normal_(0, 0.05)
        self._rotary = DeepseekV3RotaryEmbedding(config)

    def functions(
        self, context: int, batch: int
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """The attention alone, and the layer."""
        x = torch.randn(batch, 1, self._config.hidden_size)
        rotary = self._rotary(x, torch.tensor([[context - 1]]))
        cache = PlacedCache(batch, context, self._config)
        attention, layer = self._layer.self_attn, self._layer
        options = {"attention_mask": None, "past_key_values": cache}
        return (
            lambda: attention(x, rotary, **options),
            lambda: layer(x, position_embeddings=rotary, **options),
        )


def in_turns(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Median milliseconds of each function."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    begin = time.perf_counter()
    while len(times[0]) < 2 or (
        len(times[0]) < MAX_TURNS and time.perf_counter() - begin < SECONDS
    ):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [median(taken) * 1e3 for taken in times]


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("configs/models/demo-base"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = DeepseekV3Config.from_pretrained(args.model)
    config.max_position_embeddings = max(CONTEXTS) + 2  # one new token and its draft
    ours, theirs = Ours(args.model, config), Theirs(config)
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        for context in CONTEXTS:
            functions = (
                ours.attention(context, batch),
                ours.call(context, batch),
                *theirs.functions(context, batch),
            )
            names = (
                "attention ms",
                "call ms",
                "transformers attention ms",
                "transformers layer ms",
            )
            times = (round(taken, 2) for taken in in_turns(functions))
            rows.append(
                {"batch": batch, "context": context, **dict(zip(names, times, strict=True))}
            )
    print_rows(Console(), f"one new token a text, {args.threads} threads", rows)
    result = {"threads": args.threads, "seed": 0, "milliseconds": rows}
    print(json.dumps({"benchmark": "mtp-context", **circumstances(), **result}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
