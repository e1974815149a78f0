from __future__ import annotations

import random
import re

import pytest

from specserve.compare.corpus import Module, load_modules
from specserve.compare.tasks import TaskMaker, functions_of

SOURCE = '''
class Shape:
    def area(self, width,
             height=2):
        """The area.

        In square metres.
        """
        size = width * height
        return size

    def one_line(self): return 1


def total(values):
    result = 0
    for value in values:
        result += value
    return result
'''


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return [m for m in load_modules(held_out=True) if len(m.text) < 60_000]


@pytest.fixture(scope="module")
def maker(modules: list[Module]) -> TaskMaker:
    return TaskMaker(modules)


def test_functions_are_cut_out_whole_and_dedented() -> None:
    area, total = functions_of(Module(name="shape.py", text=SOURCE))
    assert (area.name, total.name) == ("area", "total")
    assert area.signature == "def area(self, width,\n         height=2):"
    assert area.docstring_lines == (2, 5)
    assert area.code.splitlines()[-1] == "    return size"
    assert (total.signature, total.docstring) == ("def total(values):", "")


def test_a_module_that_does_not_parse_has_no_functions() -> None:
    assert functions_of(Module(name="old.py", text="print 'hello'\n" * 20)) == []


def test_every_kind_of_task_ends_with_an_answer(maker: TaskMaker) -> None:
    for kind in maker.kinds:
        task = maker.draw(random.Random(kind), 3000, kind)
        assert [m["role"] for m in task][-2:] == ["user", "assistant"]
        assert sum(len(m["content"]) for m in task) < 2 * 3000
        assert task[-1]["content"].strip()


def test_a_renamed_function_differs_only_in_its_name(maker: TaskMaker) -> None:
    for seed in range(20):
        task = maker.draw(random.Random(seed), 2000, "rename")
        question, answer = (m["content"] for m in task[-2:])
        ask, code = question.split("\n", 1)
        old, new = ask.split("`")[1:4:2]
        assert answer != code
        assert re.sub(rf"\b{new}\b", old, answer) == code
        assert not re.search(rf"\b{old}\b", answer)


def test_quoted_code_is_in_the_question(maker: TaskMaker) -> None:
    for seed in range(20):
        task = maker.draw(random.Random(seed), 2000, "quote")
        question, answer = (m["content"] for m in task[-2:])
        assert answer.removeprefix("```python\n").removesuffix("\n```") in question


def test_equal_seeds_draw_equal_tasks(modules: list[Module]) -> None:
    first, second = TaskMaker(modules), TaskMaker(modules)
    for seed in range(30):
        a = first.draw(random.Random(seed), 1500)
        assert a == second.draw(random.Random(seed), 1500)
