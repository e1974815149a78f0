from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import prometheus_client
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from specserve.core.config import parse
from specserve.core.metrics import SpeculationMetrics, SpeculationSnapshot
from specserve.serve import speculation
from specserve.serve.shared import AS_OF, FRESH_S
from specserve.serve.speculation import SpeculationMonitor
from tests.counts import count_draft
from tests.integration.cluster import eventually


class Rank0:
    """Answers as the engine's first rank does, until it fails or hangs."""

    def __init__(self) -> None:
        self.metrics = SpeculationMetrics(("ngram",))
        self.metrics.set_up("ngram", True)
        self.error: Exception | None = None
        self.hangs = False
        self.num_asked = 0

    async def __call__(self) -> SpeculationSnapshot:
        self.num_asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.metrics.snapshot()


@pytest.fixture
def rank0() -> Rank0:
    return Rank0()


@pytest.fixture
def client(rank0: Rank0, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    config = parse({"model": {"path": "m"}, "speculation": [{"kind": "ngram"}]})
    app = FastAPI()
    app.include_router(SpeculationMonitor(config, rank0).router())
    with TestClient(app) as client:
        yield client


def test_acceptance_is_reported_by_source_and_position(client: TestClient, rank0: Rank0) -> None:
    count_draft(rank0.metrics, "ngram", 3, 2)
    count_draft(rank0.metrics, "ngram", 1, 0)
    answer = client.get("/v1/speculation").json()
    assert [(source["kind"], source["up"]) for source in answer["sources"]] == [("ngram", True)]
    assert answer["acceptance"]["ngram"] == {
        "drafts": 2,
        "draft_tokens": 4,
        "accepted_tokens": 2,
        "mean_accepted_length": 1.0,
        "drafted_at_position": [2, 1, 1],
        "accepted_at_position": [1, 1, 0],
        "acceptance_rate_at_position": [0.5, 1.0, 0.0],
    }


def test_paths_and_placement_of_sources_are_not_shown() -> None:
    trie = {"kind": "trie", "snapshot_url": "sftp://user:secret@host/folder", "min_match_len": 3}
    config = parse({"model": {"path": "m"}, "speculation": [trie]})
    app = FastAPI()
    app.include_router(SpeculationMonitor(config, Rank0()).router())
    with TestClient(app) as client:
        answer = client.get("/v1/speculation")
    assert answer.json()["sources"][0]["min_match_len"] == 3
    assert not {"snapshot_url", "store_resources"} & answer.json()["sources"][0].keys()
    assert "secret" not in answer.text


def test_the_reason_for_a_missing_drafter_is_reported(client: TestClient, rank0: Rank0) -> None:
    rank0.metrics.set_reachable("ngram", False, "no node has free what it asks for")
    (source,) = client.get("/v1/speculation").json()["sources"]
    assert (source["up"], source["reason"]) == (False, "no node has free what it asks for")


@pytest.mark.parametrize("hangs", [True, False])
def test_the_last_counts_are_reported_if_the_engine_does_not_answer(
    client: TestClient, rank0: Rank0, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    count_draft(rank0.metrics, "ngram", 3, 2)
    before = client.get("/v1/speculation").json()
    rank0.hangs, rank0.error = hangs, RuntimeError("the engine has died")
    monkeypatch.setattr(speculation, "SNAPSHOT_TIMEOUT_S", 0.05)

    def has_failed() -> bool:
        assert client.get("/v1/speculation").json() == before
        return rank0.num_asked > 1  # not before the first answer is a second old

    eventually(has_failed, "another question to the engine", 30)


def test_calls_within_a_second_share_one_answer_of_the_engine(
    client: TestClient, rank0: Rank0
) -> None:
    began = time.monotonic()
    answers = [client.get("/v1/speculation") for _ in range(20)]
    assert {answer.content for answer in answers} == {answers[0].content}
    assert 1 <= rank0.num_asked <= 1 + int((time.monotonic() - began) / FRESH_S)


def test_an_answer_has_the_time_of_its_counts(client: TestClient) -> None:
    before = time.time()
    answer = client.get("/v1/speculation")
    assert before <= float(answer.headers[AS_OF]) <= time.time()
    again = client.get("/v1/speculation").headers[AS_OF]
    assert again == answer.headers[AS_OF] or float(again) >= before + FRESH_S
    assert answer.headers["Cache-Control"] == "max-age=1"
