"""Garbage collection is off during a large import."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from specserve.core.importing import without_collections


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_collection_is_on_afterwards_even_after_an_error() -> None:
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()
