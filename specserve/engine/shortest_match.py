"""Lengths of the shortest texts that a grammar's rules match.

A text that a grammar forces is the beginning of every text that it still matches. So it has no end
if a rule matches no finite text, such as ``root ::= "a" root``, and xgrammar's search for it never
returns.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import import_module
from math import inf
from typing import Any

LONGEST = 8192
"""Bytes; a rule whose shortest match is longer counts as endless."""

_MAX_TEXT, _MAX_VISITS = 1 << 18, 400_000
"""Characters of a grammar, and visits of its parts. A larger grammar counts as endless."""

_VERSION = "v16"
"""Of xgrammar's JSON. A grammar in another form counts as endless."""

_regex_parser: Any = import_module("re._parser")
"""Python's parser of regular expressions; ``re`` has no public function for their widths."""


@lru_cache(64)
def longest_of_shortest(grammar: str) -> float:
    """The longest of the shortest matches of all rules, in bytes; inf: over :data:`LONGEST`.

    Args:
        grammar: the printed form of an ``xgrammar.Grammar``.
    """
    from xgrammar import Grammar  # takes 0.4 s; vLLM imports it with the first grammar

    if len(grammar) > _MAX_TEXT:
        return inf
    # A compiled grammar's own JSON also has its automata: 85 MB for an object of 300 keys.
    parsed = json.loads(Grammar.from_ebnf(grammar).serialize_json())
    if parsed["__VERSION__"] != _VERSION:
        return inf
    data: list[int] = parsed["grammar_expr_data"]
    parts = [data[at : at + 2 + data[at + 1]] for at in parsed["grammar_expr_indptr"]]
    bodies = [part for _, part, *_ in parsed["rules"]]
    lengths = [inf] * len(bodies)
    rules, num_visits = list(range(len(bodies))), 0

    def length(part: int) -> float:
        nonlocal num_visits
        num_visits += 1
        kind, size, *content = parts[part]
        match kind:
            case 0:  # a text
                return float(size)
            case 2 | 3 | 7 | 11:  # any number of characters, nothing, free text with tags
                return 0
            case 4:
                return lengths[content[0]]
            case 5:  # a sequence
                return sum(map(length, content))
            case 6:  # alternatives
                return min(map(length, content), default=inf)
            case 8:
                rule, least, _ = content
                return least and least * lengths[rule]
            case 12:
                return _width(bytes(each & 255 for each in content[1:]).decode())
        return 1  # a character, or a token of some kind

    is_changed = True
    while is_changed and num_visits < _MAX_VISITS:
        is_changed = False
        for rule in rules:
            found = length(bodies[rule])
            if found < lengths[rule] and found <= LONGEST:
                lengths[rule], is_changed = found, True
        rules.reverse()  # a rule may follow or precede the rules that it names
    return inf if is_changed else max(lengths, default=inf)


@lru_cache(1024)
def _width(pattern: str) -> float:
    """Characters of the shortest match of a regular expression; inf: Python cannot read it."""
    try:
        return float(_regex_parser.parse(pattern).getwidth()[0])
    except (re.error, OverflowError, RecursionError):
        return inf
