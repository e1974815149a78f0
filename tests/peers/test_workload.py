"""Requests of the benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers.workload import NUM_FILES, Workload


@pytest.mark.timeout(60)
def test_an_agent_skips_a_kind_of_task_that_fits_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_quotes = 0

    def task(self: Workload, module: object, kind: str) -> str:
        nonlocal num_quotes
        num_quotes += kind == "quote"
        return "" if kind == "quote" and num_quotes > NUM_FILES else kind

    monkeypatch.setattr(Workload, "_task", task)
    tokenizer: Any = None  # only tasks need it
    asked = Workload(tokenizer, 0).load("agent", 2, 22).measured
    assert len(asked) == 22
    assert {request.prompt for request in asked} == {"rename", "repeat", "strip_docstring"}
