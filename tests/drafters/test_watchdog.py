from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import closing
from typing import cast

import pytest

from specserve.drafters import watchdog
from specserve.drafters.server import DrafterServer
from tests.drafters.fakes import WAIT_S, FakeDrafter
from tests.drafters.test_server import Client, row


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
        watchdog._watch(server)
        drafter.may_go.set()
    assert ends == [1]


class Slow:
    """A server that began the turn at hand at these times, seen second by second."""

    def __init__(self, begins: Iterable[float | None]) -> None:
        self._begins = iter(begins)
        self.seen: list[float | None] = []

    @property
    def turn_began(self) -> float | None:
        self.seen.append(next(self._begins))
        return self.seen[-1]


def test_only_the_seconds_of_one_turn_count(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = watchdog.LONGEST_TURN_S
    slow = Slow([1.0] * most + [None] + [2.0] * most + [3.0] * (most + 1))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    watchdog._watch(cast(DrafterServer, slow))
    assert ends == [1]
    assert len(slow.seen) == 3 * most + 2
