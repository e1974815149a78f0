from __future__ import annotations

import random

import pytest

from specserve.compare.corpus import load_modules
from tools.demo_models.tasks import AllTasks


@pytest.fixture(scope="module")
def maker() -> AllTasks:
    return AllTasks([m for m in load_modules(held_out=True) if len(m.text) < 60_000])


def test_every_kind_of_task_ends_with_an_answer(maker: AllTasks) -> None:
    for kind in maker.kinds:
        task = maker.draw(random.Random(kind), 3000, kind)
        assert [m["role"] for m in task][-2:] == ["user", "assistant"]
        assert sum(len(m["content"]) for m in task) < 2 * 3000
        assert task[-1]["content"].strip()


def test_repeated_code_is_in_the_question(maker: AllTasks) -> None:
    for seed in range(20):
        task = maker.draw(random.Random(seed), 2000, "repeat")
        question, answer = (m["content"] for m in task[-2:])
        assert answer.removeprefix("```python\n").removesuffix("\n```") in question
