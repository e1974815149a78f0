"""Garbage is not collected while something large is imported."""

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


def test_it_collects_again_afterwards_also_after_an_error() -> None:
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()


def test_who_had_it_off_has_it_off_still() -> None:
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()
