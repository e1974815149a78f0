"""What a replica reads of its deployment, by Ray's own classes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve._private.config import DeploymentConfig

from specserve.core.errors import EngineError
from specserve.serve import server
from specserve.trie import store_actor


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"num_replicas": 3}, 3),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 5}}, 5),
    ],
)
def test_the_most_replicas_are_the_configured_or_the_scaled_ones(
    options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(_deployment_config=DeploymentConfig(**options))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    assert server._most_replicas() == most


def test_a_replica_is_unhealthy_once_another_node_of_its_shards_is_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = [ConnectionError("the head is away"), {"other": 0}, {"second": 0}]

    def draining_nodes(timeout: float) -> dict[str, int]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    async def healthy() -> None:
        pass

    context = SimpleNamespace(gcs_address="", get_node_id=lambda: "own")
    cluster = SimpleNamespace(get_draining_nodes=draining_nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(store_actor, "GcsClient", lambda address: cluster)
    monkeypatch.setattr(store_actor, "DRAIN_CHECK_S", 0.0)
    replica: Any = SimpleNamespace(_is_leaving=False, _engine=SimpleNamespace(check_health=healthy))
    asyncio.run(server.ModelServer.check_health(replica))
    server.ModelServer._leave_with(replica, ["first", "second"])
    assert not answers
    with pytest.raises(EngineError, match="drained"):
        asyncio.run(server.ModelServer.check_health(replica))
