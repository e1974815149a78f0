"""What a grammar forces is drafted; the matchers are xgrammar's own."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from xgrammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    allocate_token_bitmask,
)

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import GrammarConfig
from specserve.core.types import Int32Array, RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.grammar import LAST, ONLY_ONE, UNUSUAL, USUAL, GrammarSource
from tests.draft_batches import draft_batch
from tests.integration.cluster import model_path

PROMPT = [7, 8, 9]
SCHEMA = {
    "type": "object",
    "properties": {
        "house_number": {"type": "integer"},
        "street_name": {"type": "string"},
        "country": {"enum": ["Germany", "Greece"]},
    },
    "required": ["house_number", "street_name", "country"],
    "additionalProperties": False,
}
BEGINNING = '{"house_number":'


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("demo-draft"))


@cache
def compiled(schema: str) -> CompiledGrammar:
    compiler = GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer()))
    return compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))


def tokens_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


class Followed:
    """A request's grammar as the engine has it; ``split`` may be told what to answer."""

    def __init__(self, schema: object = SCHEMA) -> None:
        self.matcher = GrammarMatcher(compiled(json.dumps(schema)))
        self.splits: dict[str, tuple[list[int], bool]] = {}
        self._num_seen = 0

    def after(self, answer: Int32Array) -> GrammarMatcher | None:
        for token in answer[self._num_seen :].tolist():
            if not self.matcher.accept_token(token):
                raise ValueError(f"refused: {token}")
        self._num_seen = len(answer)
        return None if self.matcher.is_terminated() else self.matcher

    def num_allowed(self) -> int:
        mask = allocate_token_bitmask(1, tokenizer().vocab_size)
        self.matcher.fill_next_token_bitmask(mask)
        return int(np.bitwise_count(mask.numpy().view(np.uint32)).sum())

    def split(self, answer: Int32Array, text: str) -> tuple[list[int], bool]:
        return self.splits.get(text, (tokens_of(text), True))


class Asked:
    """The source, asked for drafts of one request after another."""

    def __init__(self, max_draft_len: int = 16) -> None:
        self.metrics = SpeculationMetrics(("grammar",))
        config = GrammarConfig(kind="grammar", max_draft_len=max_draft_len)
        self.source = GrammarSource.build(config, SourceContext(num_slots=4, metrics=self.metrics))
        self.confidence: list[float] = []

    def open(self, slot: int, grammar: Followed, **controls: Any) -> None:
        self.source.open(slot, RequestControls(grammar=grammar, **controls))

    def draft(self, answer: Sequence[int], *, slot: int = 0, limit: int = 128) -> list[int]:
        """What is forced after this answer, by the source."""
        batch = draft_batch({slot: [*PROMPT, *answer]}, num_prompt_tokens=len(PROMPT))
        found = self.source.propose(batch, np.array([limit], np.int32))
        length = int(found.lengths[0])
        self.confidence = found.confidence[0, :length].tolist()
        return list(found.tokens[0, :length].tolist())


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_the_forced_text_is_drafted_up_to_where_the_answer_is_free(asked: Asked) -> None:
    asked.open(0, Followed())
    expected = tokens_of(BEGINNING)
    assert asked.draft([]) == expected
    assert asked.draft(expected[:3]) == expected[3:]
    assert asked.draft(expected) == []
    answer = [*expected, *tokens_of("12,")]
    forced = asked.draft(answer)
    assert tokenizer().decode(forced) == '"street_name":"'
    answer = [*answer, *forced, *tokens_of('a street","country":"G')]
    assert asked.draft(answer) == []
    answer += tokens_of("re")
    assert tokenizer().decode(asked.draft(answer)) == 'ece"}'


def test_asking_twice_changes_nothing_and_the_limit_cuts_a_draft(asked: Asked) -> None:
    asked.open(0, Followed())
    expected = tokens_of(BEGINNING)
    assert [asked.draft([]), asked.draft([], limit=3), asked.draft([], limit=0)] == [
        expected,
        expected[:3],
        [],
    ]
    assert asked.draft([]) == expected
    short = Asked(max_draft_len=2)
    short.open(0, Followed())
    assert short.draft([]) == expected[:2]


def test_it_is_sure_of_a_token_that_alone_is_allowed_and_less_so_of_others(asked: Asked) -> None:
    grammar = Followed()
    asked.open(0, grammar)
    draft = asked.draft([])
    # Each token's alternatives are counted by the mask, one after another.
    counted = []
    for token in draft:
        counted.append(grammar.num_allowed())
        assert grammar.matcher.accept_token(token)
    grammar.matcher.rollback(len(draft))
    assert {1} < set(counted)
    expected = [ONLY_ONE if number == 1 else USUAL for number in counted]
    expected[-1] = ONLY_ONE if counted[-1] == 1 else LAST
    assert asked.confidence == pytest.approx(expected)
    asked.draft([], limit=4)
    assert asked.confidence == pytest.approx([ONLY_ONE if n == 1 else USUAL for n in counted[:4]])


def test_after_an_unusual_split_it_is_less_sure(asked: Asked) -> None:
    grammar = Followed()
    asked.open(0, grammar)
    written = tokens_of('{"h')
    rest = 'ouse_number":'
    grammar.splits[rest] = (tokens_of(rest), False)
    assert asked.draft(written) == tokens_of(rest)
    assert {round(each, 3) for each in asked.confidence} == {ONLY_ONE, UNUSUAL}
    assert asked.confidence[0] == pytest.approx(UNUSUAL)


def test_a_split_that_the_grammar_refuses_ends_there(asked: Asked) -> None:
    grammar = Followed()
    asked.open(0, grammar)
    expected = tokens_of(BEGINNING)
    grammar.splits[BEGINNING] = ([*expected[:2], *tokens_of("}")], True)
    assert asked.draft([]) == expected[:2]
    grammar.splits[BEGINNING] = ([], True)
    assert asked.draft([]) == []
    del grammar.splits[BEGINNING]
    assert asked.draft([]) == expected


def test_nothing_is_drafted_after_the_grammars_end(asked: Asked) -> None:
    asked.open(0, Followed({"const": "yes"}))
    whole = tokens_of('"yes"')
    assert asked.draft([]) == whole
    assert asked.draft(whole) == []
    assert asked.draft([*whole, tokenizer().eos_token_id]) == []


def test_steps_that_did_not_ask_are_followed_later(asked: Asked) -> None:
    asked.open(0, Followed())
    asked.draft([])
    answer = tokens_of('{"house_number":1,"street_name":"a","country":"Ge')
    assert tokenizer().decode(asked.draft(answer)) == 'rmany"}'


def test_a_grammar_that_cannot_be_followed_costs_its_own_request_alone(asked: Asked) -> None:
    asked.open(0, Followed())
    asked.open(1, Followed())
    batch = draft_batch({0: [*PROMPT, *tokens_of("no")], 1: PROMPT}, num_prompt_tokens=len(PROMPT))
    limits = np.full(2, 16, np.int32)
    for _ in range(2):
        assert asked.source.propose(batch, limits).lengths.tolist() == [
            0,
            len(tokens_of(BEGINNING)),
        ]
    (health,) = asked.metrics.snapshot().health
    assert (health.up, health.num_errors) == (True, 1)
    assert health.reason == "a request's grammar is not followed: ValueError, see the log"
    asked.source.close(np.array([0]))
    asked.open(0, Followed())
    assert asked.draft([]) == tokens_of(BEGINNING)


def test_it_drafts_for_no_request_that_wants_none_of_its_drafts_or_has_no_grammar(
    asked: Asked,
) -> None:
    asked.open(0, Followed(), speculation="ngram")
    asked.open(1, Followed(), max_draft_tokens=0)
    asked.source.open(2, RequestControls())
    assert [asked.draft([], slot=slot) for slot in range(3)] == [[], [], []]


def test_nothing_is_left_of_a_request_that_has_ended(asked: Asked) -> None:
    grammar = Followed()
    left = weakref.ref(grammar)
    asked.open(0, grammar)
    asked.draft([])
    asked.source.close(np.array([0]))
    del grammar
    gc.collect()
    assert left() is None
    assert asked.draft([]) == []
