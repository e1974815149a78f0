"""Fixtures: a fake drafter and a replica that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.drafters.fakes import FakeDrafter
from tests.sources.remote_replica import Place, Replica, replica, serve


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def drafter() -> FakeDrafter:
    return FakeDrafter()


@pytest.fixture
def served(stack: ExitStack, place: Place, drafter: FakeDrafter) -> Replica:
    """A replica whose drafter is up."""
    serve(stack, place, drafter)
    made = replica(stack, place)
    made.until_up()
    return made
