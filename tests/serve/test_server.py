"""What a replica reads of its deployment, by Ray's own classes."""

from __future__ import annotations

import asyncio
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve._private.config import DeploymentConfig

from specserve.core.config import parse
from specserve.core.errors import EngineError
from specserve.serve import server
from specserve.serve.progress import Progress
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


@pytest.mark.parametrize(
    ("host", "prefix", "certificate", "url"),
    [
        ("0.0.0.0", "/", None, "http://127.0.0.1:8000"),
        ("10.0.0.7", "/team", None, "http://10.0.0.7:8000/team"),
        ("10.0.0.7", "/", "tls.crt", "https://10.0.0.7:8000"),
    ],
)
def test_a_ready_replica_prints_its_address_and_a_command(
    host: str, prefix: str, certificate: str | None, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SimpleNamespace(
        http_config=SimpleNamespace(host=host, port=8000, ssl_certfile=certificate),
        get_serve_details=lambda: {"applications": {"mine": {"route_prefix": prefix}}},
    )
    monkeypatch.setattr(server, "_get_global_client", lambda: client)
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="mine"))
    printed = io.StringIO()
    monkeypatch.setattr(sys, "__stdout__", printed)
    Progress("demo").ready(server._base_url())
    ready, command = printed.getvalue().splitlines()
    assert ready.endswith(f"] ready: OpenAI API at {url}/v1")
    assert f"] try: curl {url}/v1/completions -H " in command
    assert '"model": "demo"' in command


@pytest.mark.parametrize(
    ("options", "level"), [({}, "WARNING"), ({"enable_log_requests": True}, "INFO")]
)
def test_an_option_that_asks_for_log_lines_raises_vllms_log_level(
    options: dict[str, Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise EngineError("far enough")

    environment: dict[str, str] = {}
    monkeypatch.setattr(server, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(server, "check_vllm", stop)
    config = parse({"model": {"path": "m"}, "engine": {"vllm": options}})
    replica: Any = SimpleNamespace(_config=config)
    with pytest.raises(EngineError, match="far enough"):
        asyncio.run(server.ModelServer._start(replica))
    assert environment["VLLM_LOGGING_LEVEL"] == level


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
