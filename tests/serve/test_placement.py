"""What a replica asks Ray for; tests/integration/test_plan.py asks Ray itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from specserve.core.config import PlacementConfig
from specserve.serve import placement as module
from specserve.serve.placement import reserve, running_nodes
from specserve.serve.plan import Node

HERE = {"node:10.0.0.1": 0.001}


class Groups:
    """Fake placement groups on nodes of 8 CPUs; ``fits`` tells whether a first bundle fits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fits: Callable[[Any], bool]) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.removed: list[Any] = []
        self._fits = fits
        context = SimpleNamespace(get_node_id=lambda: "here")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
        monkeypatch.setattr(module, "running_nodes", lambda: [Node("a", {"CPU": 8.0})] * 3)
        monkeypatch.setattr(module, "placement_group", self._make)
        monkeypatch.setattr(module, "remove_placement_group", self.removed.append)

    def _make(self, bundles: Any, strategy: str, _soft_target_node_id: str = "") -> Any:
        self.asked.append((bundles, strategy, _soft_target_node_id))
        return SimpleNamespace(wait=lambda _: self._fits(bundles[0]), number=len(self.asked))


@pytest.mark.parametrize(
    ("strategy", "num_shards", "first", "asked"),
    [
        ("PACK", 1, {}, ("STRICT_PACK", "here")),
        ("SPREAD", 1, {}, ("STRICT_PACK", "here")),
        ("STRICT_PACK", 8, {}, ("STRICT_PACK", "here")),
        ("PACK", 8, {}, ("PACK", "")),
        ("PACK", 9, HERE, ("PACK", "")),
        ("SPREAD", 8, HERE, ("SPREAD", "")),
        ("STRICT_SPREAD", 3, HERE, ("STRICT_SPREAD", "")),
    ],
)
def test_a_shard_is_on_the_replicas_node_unless_another_node_may_hold_all(
    strategy: Any,
    num_shards: int,
    first: dict[str, float],
    asked: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Groups(monkeypatch, lambda _: True)
    asyncio.run(reserve(PlacementConfig(strategy=strategy), {"CPU": 1.0}, num_shards))
    others = [{"CPU": 1.0}] * (num_shards - 1)
    assert groups.asked == [([{"CPU": 1.0, **first}, *others], *asked)]
    assert not groups.removed


def test_no_shard_is_there_if_that_node_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch, lambda bundle: bundle.keys().isdisjoint(HERE))
    group: Any = asyncio.run(reserve(PlacementConfig(strategy="PACK"), {"CPU": 1.0}, 9))
    assert groups.asked[1] == ([{"CPU": 1.0}] * 9, "PACK", "")
    assert group.number == 2
    assert [removed.number for removed in groups.removed] == [1]


def test_resources_that_ray_adds_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    group = 36 * "a"
    added = [f"CPU_group_{group}", f"CPU_group_0_{group}", f"bundle_group_{group}", "node:10.0.0.1"]
    resources = {"CPU": 8.0, "memory": 9.0, **dict.fromkeys(added, 1.0)}
    node = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": resources}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    assert running_nodes() == [Node("10.0.0.1", {"CPU": 8.0})]
