"""Gives the tests that `make test` leaves out their markers."""

from __future__ import annotations

import pytest

from tests.tiers import tier


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if marker := tier(item.nodeid):
            item.add_marker(marker)
