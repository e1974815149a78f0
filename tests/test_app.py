"""The application that is built for Serve, without a cluster."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.constants import MAX_PER_REPLICA_RETRY_COUNT

from specserve.app import BuildError, build

MODEL = Path(__file__).parents[1] / "configs/models/demo-draft"


def args() -> dict[str, Any]:
    keys = [{"env": "SPECSERVE_TEST_KEY", "tenant": "team-a"}]
    return {"model": {"path": str(MODEL)}, "http": {"api_keys": keys}}


def test_an_unset_key_variable_ends_the_build_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPECSERVE_TEST_KEY", raising=False)
    with pytest.raises(BuildError, match=r"^http\.api_keys\.0\.env: 'SPECSERVE_.* is not set$"):
        build(args())


def test_what_serve_keeps_does_not_depend_on_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(key: str) -> bytes:
        monkeypatch.setenv("SPECSERVE_TEST_KEY", key)
        return pickle.dumps(build(args())._bound_deployment.init_args)

    assert b"team-a" in bound("sk-old")
    assert bound("sk-old") == bound("sk-new")


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_each_replica_may_fail_to_start_once(num_replicas: int) -> None:
    given = {"model": {"path": str(MODEL)}, "placement": {"num_replicas": num_replicas}}
    config = build(given)._bound_deployment._deployment_config
    assert config.max_constructor_retry_count == 2 * num_replicas
    assert config.max_constructor_retry_count < MAX_PER_REPLICA_RETRY_COUNT * num_replicas
