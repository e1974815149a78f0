"""Marks the tests that `make test` leaves out, and checks the arguments of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from numba.core import types

from specserve.core import compile as compiling
from tests.tiers import ALONE, LONG, tier

# On a busy machine an example may take any time.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if marker := tier(item.nodeid):
            item.add_marker(marker)
    if not any("::" in argument for argument in config.args):  # else some parameters are left out
        names = {item.nodeid.removeprefix("tests/") for item in items}
        files = {name.partition("::")[0] for name in names}
        rows = {row for row in (*LONG, *ALONE) if "[" in row and row.partition("::")[0] in files}
        assert rows <= names, f"tests/tiers.py names no test: {rows - names}"


_direct = compiling.direct


def _checked(function: Any, *arguments: object) -> Callable[..., Any]:
    """Like ``direct``, but its code refuses arguments of other types. Numbers are converted."""
    code, expected = _direct(function, *arguments), list(map(function.typeof_pyval, arguments))

    def call(*given: object) -> Any:
        found = list(map(function.typeof_pyval, given))
        for one, other in zip(expected, found, strict=True):
            assert one == other or isinstance(one, types.Number | types.Boolean), (
                f"{function.py_func.__name__} takes {one}, not {other}"
            )
        return code(*given)

    return call


compiling.direct = _checked
