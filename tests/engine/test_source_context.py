"""The context that sources get from their replica."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from specserve.core.config import parse
from specserve.core.metrics import SpeculationMetrics
from specserve.engine.source_context import source_context


def test_the_context_has_the_configured_tenants_adapters_and_label_key() -> None:
    keys = [{"env": f"{name}_KEY", "tenant": name} for name in ("b", "a", "b")]
    keys[2]["env"] = "B_NEW_KEY"
    modules = [{"name": "sql", "path": "somewhere"}]
    config = parse(
        {
            "model": {"path": "m"},
            "speculation": [{"kind": "ngram"}],
            "http": {"api_keys": keys},
            "engine": {"vllm": {"lora_modules": modules}},
        }
    )
    vllm_config: Any = SimpleNamespace(
        additional_config={"specserve_label_key": b"a key".hex()},
        model_config=SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100),
        lora_config=SimpleNamespace(max_cpu_loras=3, max_loras=1),
    )
    metrics = SpeculationMetrics(("ngram",))
    exits: list[Callable[[], None]] = []
    context = source_context(config, vllm_config, metrics, 8, exits, threading.Event())

    assert (context.tenants, context.adapters) == (("a", "b"), ("sql",))
    assert (context.num_adapters, context.label_key) == (3, b"a key")
    assert (context.num_slots, context.vocab_size, context.exits) == (8, 100, exits)
    assert (context.model_identity, context.tokenizer, context.share) == ("", "", None)
