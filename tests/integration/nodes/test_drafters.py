"""Faults of a drafter's actor, with real Ray, a real model and real signals."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.cluster import Cluster, eventually, suspend
from tests.integration.drafter_host import TIMEOUT_S, DrafterHost

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


def await_draft(host: DrafterHost, text: list[int]) -> list[int]:
    tokens: list[int] = eventually(lambda: host.propose(text)["tokens"], "a draft", WAIT_S, 0.05)
    return tokens


def test_replicas_share_one_drafter_and_get_the_same_drafts(
    cluster: Cluster, hosts: list[DrafterHost]
) -> None:
    drafts = [await_draft(host, TEXT) for host in hosts]
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 3
    assert drafter(cluster).is_running()


def test_a_stopped_drafter_costs_one_timeout_and_is_used_again_within_a_second(
    cluster: Cluster, hosts: list[DrafterHost]
) -> None:
    host, process = hosts[0], drafter(cluster)
    draft = await_draft(host, TEXT)
    before = host.propose(TEXT)["timeouts"]
    suspend(process)
    try:
        answers = [host.propose(TEXT + draft[: 1 + step % 2]) for step in range(20)]
    finally:
        process.resume()
    began = time.monotonic()
    await_draft(host, TEXT)
    assert time.monotonic() - began < 1.0
    assert [answer["tokens"] for answer in answers] == [[]] * 20
    assert answers[-1]["timeouts"] == before + 1
    assert max(answer["seconds"] for answer in answers[1:]) < TIMEOUT_S / 2


def test_a_killed_drafter_is_restarted_and_drafts(
    cluster: Cluster, hosts: list[DrafterHost]
) -> None:
    draft, other = await_draft(hosts[0], TEXT), await_draft(hosts[0], TEXT[:-1])
    killed = drafter(cluster)
    killed.kill()
    assert await_draft(hosts[0], TEXT[:-1]) == other
    assert [await_draft(host, TEXT) for host in hosts] == [draft, draft]
    assert drafter(cluster).pid != killed.pid
