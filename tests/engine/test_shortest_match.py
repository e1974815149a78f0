"""Lengths of the shortest matches, of grammars in xgrammar's own printed form."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest
from xgrammar import Grammar

from specserve.engine.shortest_match import LONGEST, longest_of_shortest


def ebnf(text: str) -> float:
    return longest_of_shortest(str(Grammar.from_ebnf(text)))


def schema(value: dict[str, Any]) -> float:
    grammar = Grammar.from_json_schema(
        json.dumps(value), any_whitespace=False, separators=(",", ":")
    )
    return longest_of_shortest(str(grammar))


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ('root ::= ""', 0),
        ('root ::= "ab" | "c"', 1),
        ('root ::= "a\\"b|(=" [^\\]"|(]* [a-z] "\\u00e9"', 9),
        ('root ::= x{3,5} y\ny ::= x{2,}\nx ::= "abc" | "de"', 10),
        ('root ::= "a" root | "b"', 1),
        ('root ::= x (="tail")\nx ::= "ab"', 2),
        (f'root ::= "{LONGEST * "a"}"', LONGEST),
        (f'root ::= "{(LONGEST + 1) * "a"}"', inf),
        ('root ::= "a" x\nx ::= "b" root', inf),
        ('root ::= "a" | x\nx ::= "b" x "c"', inf),
    ],
)
def test_the_longest_of_the_rules_shortest_matches(text: str, length: float) -> None:
    assert ebnf(text) == length


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_long_chain_of_rules_is_followed(is_reversed: bool) -> None:
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(500)]
    chain = ["root ::= r0", *(reversed(rules) if is_reversed else rules), 'r500 ::= "b"']
    assert ebnf("\n".join(chain)) == 501


def test_texts_that_double_with_each_rule_are_endless_in_practice() -> None:
    rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)]
    assert ebnf("\n".join(["root ::= r0", *rules, 'r40 ::= "a"'])) == inf


def test_json_schemas() -> None:
    node: dict[str, Any] = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}},
        "additionalProperties": False,
    }
    assert schema(node | {"required": ["v"]}) < 20
    assert schema(node | {"required": ["v", "next"]}) == inf
    pattern = {"type": "string", "pattern": "^(ab){7}c+$"}
    assert 15 <= schema(pattern) <= 17
    assert schema({"type": "string", "pattern": "^[^a]{9}x?$"}) == 11


def test_tags_in_free_text() -> None:
    tag = {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": {"const": 'x")'}},
        "end": "</call>",
    }
    free = {"type": "triggered_tags", "triggers": ["<call"], "tags": [tag]}
    grammar = Grammar.from_structural_tag({"type": "structural_tag", "format": free})
    assert 10 <= longest_of_shortest(str(grammar)) < 20
