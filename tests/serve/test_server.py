"""What a replica reads of its deployment, by Ray's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve._private.config import DeploymentConfig

from specserve.serve import server


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
