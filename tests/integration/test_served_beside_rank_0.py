"""A draft model in an actor beside rank 0. The actor ends with the replica."""

from __future__ import annotations

import psutil
import pytest

from tests.integration.api import Api
from tests.integration.applications import DRAFT_MODEL, application, drafted_by
from tests.integration.cluster import Deployment, eventually
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(900)

WAIT_S = 180.0
END_S = 30.0
"""Shorter than the time that a shared drafter waits for a replica."""


def drafters(app: Deployment) -> list[psutil.Process]:
    return app.cluster.processes("ray::DraftModelDrafter")


def await_drafts(api: Api, app: Deployment) -> None:
    before = api.counts("draft_model")

    def ask() -> bool:
        api.complete(prompt="class Shape:\n", max_tokens=40, ignore_eos=True)
        return api.counts("draft_model").since(before).accepted_tokens > 0

    app.eventually(ask, "accepted drafts of the draft model", WAIT_S)


def test_a_drafter_beside_rank_0_restarts_and_ends_with_the_replica(
    stage: Stage,
) -> None:
    args = drafted_by(application(), **DRAFT_MODEL, placement="beside_rank_0")
    app = stage.serve({"/": args})
    app.await_ready()
    api = Api(app.base_url())
    with api.http:
        await_drafts(api, app)
        (first,) = drafters(app)
        first.kill()
        first.wait()
        await_drafts(api, app)
        (second,) = drafters(app)
        assert second.pid != first.pid
    stage.clear()
    eventually(lambda: not drafters(app), "the drafter's end", END_S)
