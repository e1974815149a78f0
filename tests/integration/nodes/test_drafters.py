"""Faults of a drafter's actor, with real Ray, a real model and real signals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.integration.cluster import Cluster, eventually, suspend
from tests.integration.drafter_host import DrafterHost

pytestmark = pytest.mark.timeout(600)

WAIT_S = 180.0
TEXT = [(7 * position) % 500 + 3 for position in range(40)]


@pytest.fixture(scope="module")
def cluster(faults: Cluster) -> Cluster:
    return faults


@pytest.fixture(scope="module")
def hosts(cluster: Cluster) -> Iterator[list[DrafterHost]]:
    hosts = [DrafterHost(cluster) for _ in range(2)]
    yield hosts
    for host in hosts:
        host.kill()


def drafter(cluster: Cluster) -> psutil.Process:
    """The process of the running drafter."""
    (process,) = cluster.processes("DraftModelDrafter")
    return process


def await_answer(host: DrafterHost, text: list[int]) -> dict[str, Any]:
    """An answer with a draft."""

    def drafted() -> dict[str, Any] | None:
        answer = host.propose(text)
        return answer if answer["tokens"] else None

    return eventually(drafted, "a draft", WAIT_S, 0.05)


def await_draft(host: DrafterHost, text: list[int]) -> list[int]:
    tokens: list[int] = await_answer(host, text)["tokens"]
    return tokens


def test_replicas_share_one_drafter_and_get_the_same_drafts(
    cluster: Cluster, hosts: list[DrafterHost]
) -> None:
    drafts = [await_draft(host, TEXT) for host in hosts]
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 3
    assert drafter(cluster).is_running()


def test_a_stopped_drafter_costs_one_timeout_and_is_used_again(
    cluster: Cluster, hosts: list[DrafterHost]
) -> None:
    host = hosts[0]
    await_answer(host, TEXT)
    process = drafter(cluster)
    for _ in range(3):  # on a busy machine the drafter may be down when it is stopped
        before = await_answer(host, TEXT)
        draft, num_before = before["tokens"], before["timeouts"]
        suspend(process)
        try:
            answers = [host.propose(TEXT + draft[: 1 + step % 2]) for step in range(20)]
        finally:
            process.resume()
        began = time.monotonic()
        await_draft(host, TEXT)
        seconds = time.monotonic() - began
        if answers[0]["timeouts"] > num_before:
            break
    assert seconds < 10.0
    assert [answer["tokens"] for answer in answers] == [[]] * 20
    assert [answer["timeouts"] for answer in answers] == [num_before + 1] * 20
    # A timeout in each step would take 38 s.
    assert sum(answer["seconds"] for answer in answers[1:]) < 10.0


def test_a_killed_drafter_is_restarted_and_drafts(
    cluster: Cluster, hosts: list[DrafterHost]
) -> None:
    draft, other = await_draft(hosts[0], TEXT), await_draft(hosts[0], TEXT[:-1])
    killed = drafter(cluster)
    killed.kill()
    assert await_draft(hosts[0], TEXT[:-1]) == other
    assert [await_draft(host, TEXT) for host in hosts] == [draft, draft]
    assert drafter(cluster).pid != killed.pid
