"""Lengths of the shortest texts that a grammar's rules match, from xgrammar's form of the grammar.

A text that a grammar forces is the beginning of every text that it still matches. So it has no end
if a rule matches no finite text, such as ``root ::= "a" root``, and xgrammar's search for it never
returns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from math import inf
from typing import Any

LONGEST = 8192
"""Bytes; a rule whose shortest match is longer counts as endless."""

_MAX_TEXT, _MAX_VISITS = 1 << 18, 200_000
"""Characters of a grammar, and visits of its parts. A larger grammar counts as endless."""

_RULE = re.compile(r"(?:^|\n)(\S+) ::= ")
_STRING = r'"(?:[^"\\]|\\.)*"'
_ITEM = re.compile(
    rf"""(?P<string>{_STRING})
    |(?P<characters>\[(?:[^\]\\]|\\.)*\])(?P<any>\*)?
    |(?P<end>\(=)                                    # what must follow is not a part of the rule
    |(?P<call>\w+)\((?P<pattern>{_STRING})?(?:[^")]|{_STRING})*\)
    |(?P<rule>[^\s(){{}}|]+)(?:{{(?P<least>\d+),\s*-?\d+}})?
    |(?P<bar>\|)""",
    re.S | re.X,
)

_regex_parser: Any = import_module("re._parser")
"""Python's parser of regular expressions; ``re`` has no public function for their widths."""

_Alternative = tuple[float, list[tuple[str, int]]]
"""Bytes of an alternative apart from its rules, and these rules with their repetitions."""


@lru_cache(64)
def longest_of_shortest(grammar: str) -> float:
    """The longest of the shortest matches of all rules, in bytes; inf: over :data:`LONGEST`.

    Args:
        grammar: the printed form of an ``xgrammar.Grammar``.
    """
    if len(grammar) > _MAX_TEXT:
        return inf
    _, *parts = _RULE.split(grammar)
    rules = {
        name: list(_alternatives(body)) for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
    lengths = dict.fromkeys(rules, inf)
    names, visits = list(rules), 0
    is_changed = True
    while is_changed and visits < _MAX_VISITS:
        is_changed = False
        for name in names:
            visits += sum(1 + len(named) for _, named in rules[name])
            found = min((_length(each, lengths) for each in rules[name]), default=inf)
            if found < lengths[name] and found <= LONGEST:
                lengths[name], is_changed = found, True
        names.reverse()  # a rule may follow or precede the rules that it names
    return inf if is_changed else max(lengths.values(), default=inf)


def _alternatives(body: str) -> Iterator[_Alternative]:
    """A rule's alternatives."""
    size: float = 0
    rules: list[tuple[str, int]] = []
    for item in _ITEM.finditer(body):
        if item["end"] or item["call"] == "TagDispatch":  # free text with tags may be empty
            break
        if item["bar"]:
            yield size, rules
            size, rules = 0, []
        elif item["rule"]:
            rules.append((item["rule"], int(item["least"] or 1)))
        elif item["string"]:
            size += len(ast.literal_eval(item["string"]).encode())
        elif item["characters"]:
            size += not item["any"]
        elif item["call"] == "Regex":
            size += _width(ast.literal_eval(item["pattern"]))
        else:
            size += 1  # one token of some kind
    yield size, rules


def _length(alternative: _Alternative, lengths: dict[str, float]) -> float:
    size, rules = alternative
    return size + sum(times and times * lengths[name] for name, times in rules)


def _width(pattern: str) -> float:
    """Characters of the shortest match of a regular expression; inf: Python cannot read it."""
    try:
        return float(_regex_parser.parse(pattern).getwidth()[0])
    except (re.error, OverflowError, RecursionError):
        return inf
