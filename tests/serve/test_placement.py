"""What a replica asks Ray for; tests/integration/test_plan.py asks Ray itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from specserve.core.config import PlacementConfig
from specserve.serve import placement as module
from specserve.serve.placement import reserve


@pytest.mark.parametrize(
    ("strategy", "num_shards", "asked"),
    [
        ("PACK", 1, ("STRICT_PACK", "here")),
        ("SPREAD", 1, ("STRICT_PACK", "here")),
        ("STRICT_PACK", 8, ("STRICT_PACK", "here")),
        ("PACK", 8, ("PACK", None)),
        ("STRICT_SPREAD", 2, ("STRICT_SPREAD", None)),
    ],
)
def test_shards_of_one_node_are_on_the_replicas_node_if_it_has_room(
    strategy: Any, num_shards: int, asked: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def make(bundles: list[Any], strategy: str, _soft_target_node_id: str | None = None) -> Any:
        made.append((len(bundles), strategy, _soft_target_node_id))
        return SimpleNamespace(wait=lambda timeout_s: True)

    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "placement_group", make)
    asyncio.run(reserve(PlacementConfig(strategy=strategy), {"CPU": 1.0}, num_shards))
    assert made == [(num_shards, *asked)]
