"""Behind HAProxy, as `make serve` starts it where Ray's binary runs; elsewhere Ray's own proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.api import Api
from tests.integration.cluster import HAPROXY, HOST, Deployment, eventually
from tests.integration.test_lifecycle import (
    LONG,
    SEVERAL,
    answers_finished_for_a_client_that_goes_away,
    running_stream,
)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAPROXY.exists(), reason="Ray brings HAProxy for Linux only"),
]


@pytest.fixture
def app(behind_haproxy: Deployment) -> Deployment:
    return behind_haproxy


@pytest.fixture
def api(app: Deployment) -> Iterator[Api]:
    api = Api(app.base_url())
    with api.http:
        yield api


def test_a_stream_is_the_answer_in_pieces(api: Api) -> None:
    whole = api.complete(prompt="def f(", max_tokens=24)["choices"][0]["text"]
    with api.streaming(prompt="def f(", max_tokens=24) as events:
        pieces = [event["choices"][0]["text"] for event in events]
    assert len(pieces) > 1
    assert "".join(pieces) == whole


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(api: Api, app: Deployment, stream: bool) -> None:
    assert answers_finished_for_a_client_that_goes_away(api, app, stream) == 0


def test_errors_keep_their_form(api: Api) -> None:
    answer = api.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == 404


def test_nobody_but_this_machine_is_served(app: Deployment) -> None:
    listening = {
        connection.laddr.ip
        for process in app.cluster.processes()
        for connection in process.net_connections(kind="tcp")
        if connection.status == "LISTEN" and connection.laddr.port == app.port
    }
    assert listening == {HOST}


def test_ctrl_c_ends_everything_also_a_running_request(api: Api, app: Deployment) -> None:
    with running_stream(api, **LONG, **SEVERAL) as outcome:
        app.interrupt()
        assert app.wait(60) == 0
        outcome(60)
    cluster = app.cluster
    eventually(lambda: not cluster.engine_processes(), "all engine processes gone", 60)
    eventually(lambda: not cluster.processes("bin/haproxy"), "HAProxy gone", 60)
