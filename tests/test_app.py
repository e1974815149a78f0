"""The application that is built for Serve, without a cluster."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private import constants

from specserve.app import BuildError, build

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "configs/models/demo-draft"
MAX_STARTS = 2


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


def test_only_serves_limit_for_each_replica_limits_its_starts() -> None:
    config = build({"model": {"path": str(MODEL)}})._bound_deployment._deployment_config
    assert config.max_constructor_retry_count >= 100 * MAX_STARTS


def test_serve_takes_the_highest_limits() -> None:
    most = 1 << 20
    engine = {"max_num_seqs": most, "max_num_batched_tokens": most}
    sections = {"engine": engine, "http": {"max_queued_requests": most}}
    deployment = build({"model": {"path": str(MODEL)}} | sections)._bound_deployment
    assert deployment._deployment_config.to_proto_bytes()


def test_serve_waits_for_running_requests_as_long_as_configured() -> None:
    sections = {"model": {"path": str(MODEL)}, "http": {"drain_timeout_s": 77}}
    config = build(sections)._bound_deployment._deployment_config
    assert config.graceful_shutdown_timeout_s == 77


@pytest.mark.parametrize("file", ["Makefile", "deploy/Dockerfile", "deploy/node.env"])
def test_serve_starts_each_replica_at_most_twice(file: str) -> None:
    content = (ROOT / file).read_text()
    variable = "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"
    assert re.search(rf"^ *{variable} ?\??= ?{MAX_STARTS}\b", content, re.MULTILINE)
    assert f'"{variable}"' in inspect.getsource(constants)
