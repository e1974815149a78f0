from __future__ import annotations

import os
from contextlib import closing
from types import SimpleNamespace
from typing import cast

import pytest

from specserve.drafters import watchdog
from specserve.drafters.server import DrafterServer
from tests.drafters.client import Client, row
from tests.drafters.fakes import WAIT_S, FakeDrafter


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


def test_only_the_seconds_of_one_turn_count(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=lambda seconds: None))
    most = watchdog.LONGEST_TURN_S
    began: list[float | None] = [1.0] * most + [None] + [2.0] * most + [3.0] * (most + 1)
    left = iter(began)

    class Server:
        @property
        def turn_began(self) -> float | None:
            return next(left)

    watchdog._watch(cast(DrafterServer, Server()))
    assert ends == [1]
    assert list(left) == []
