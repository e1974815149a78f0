from __future__ import annotations

import os
import threading
from contextlib import closing

import pytest

from specserve.drafters import watchdog
from specserve.drafters.server import DrafterServer
from tests.drafters.client import Client, row
from tests.drafters.fakes import WAIT_S, FakeDrafter
from tests.integration.cluster import eventually


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_turn_that_hangs_ends_the_process(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LONGEST_TURN_S", 2)
    drafter = FakeDrafter()
    with closing(DrafterServer(drafter)) as server, closing(Client(server)) as client:
        client.request(row(1, 10))
        client.receive()
        drafter.may_go.clear()
        drafter.entered.clear()
        client.request(row(1, 11))
        assert drafter.entered.wait(WAIT_S)
        watchdog._watch(lambda: server.turn_began, threading.Event())
        drafter.may_go.set()
    assert ends == [1]


class Hurried(threading.Event):
    """No time passes while it is waited for."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_only_the_seconds_of_one_turn_count(ends: list[int]) -> None:
    most = watchdog.LONGEST_TURN_S
    seconds: list[float | None] = [1.0] * most + [None] + [2.0] * most + [3.0] * (most + 1)
    left = iter(seconds)
    watchdog._watch(lambda: next(left), Hurried())
    assert ends == [1]
    assert list(left) == []


def test_what_hangs_before_the_first_turn_ends_the_process_too(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LONGEST_TURN_S", 1)
    with watchdog.ended_if_it_hangs():
        pass
    assert ends == []
    with watchdog.ended_if_it_hangs():
        eventually(lambda: ends, "the end", WAIT_S, 0.01)
    assert ends == [1]
