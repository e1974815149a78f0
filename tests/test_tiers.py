from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiers import ALONE, LONG, tier

TESTS = Path(__file__).parent


@pytest.mark.parametrize("row", [*LONG, *ALONE])
def test_each_row_names_tests_that_exist(row: str) -> None:
    file, _, test = row.partition("::")
    text = (TESTS / file).read_text()
    assert re.search(rf"^def {test.partition('[')[0] or 'test_.*'}\(", text, re.MULTILINE)


def test_a_row_covers_a_file_a_test_or_one_parameter() -> None:
    rows = [row for row in LONG if "[" in row]
    assert {tier(f"tests/{row}") for row in rows} == {"long"}
    assert tier(f"tests/{rows[0].partition('[')[0]}[shards]") == ""
    assert tier("tests/integration/test_plan.py::test_any[a/b.py::c]") == "long"
    assert tier("tests/integration/test_served_load.py::test_any") == "alone"
    assert tier("tests/integration/test_planned.py::test_any") == ""
