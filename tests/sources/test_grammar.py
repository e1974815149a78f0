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
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import GrammarConfig
from specserve.core.token_texts import TokenTexts
from specserve.core.types import Int32Array, RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.grammar import GrammarSource
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
def token_info() -> TokenizerInfo:
    return TokenizerInfo.from_huggingface(tokenizer())


@cache
def token_texts() -> TokenTexts:
    return TokenTexts(token_info().decoded_vocab, token_info().special_token_ids)


@cache
def compiled(schema: str) -> CompiledGrammar:
    compiler = GrammarCompiler(token_info())
    return compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))


def tokens_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def letters(text: str) -> list[int]:
    """The split that has most tokens."""
    return [token for each in text for token in tokens_of(each)]


class Followed:
    """A request's grammar as the engine has it."""

    def __init__(self, schema: object = SCHEMA) -> None:
        self.matcher = GrammarMatcher(compiled(json.dumps(schema)))
        self.texts = token_texts()
        self._num_seen = 0

    def forced(self, answer: Int32Array) -> str:
        for token in answer[self._num_seen :].tolist():
            if not self.matcher.accept_token(token):
                raise ValueError(f"refused: {token}")
        self._num_seen = len(answer)
        return "" if self.matcher.is_terminated() else self.matcher.find_jump_forward_string()

    def usual(self, answer: Int32Array, text: str) -> list[int]:
        return tokens_of(text)


class Asked:
    """The source, asked for drafts of one request after another."""

    def __init__(self, max_draft_len: int = 16) -> None:
        self.metrics = SpeculationMetrics(("grammar",))
        config = GrammarConfig(kind="grammar", max_draft_len=max_draft_len)
        self.source = GrammarSource(config, SourceContext(num_slots=4, metrics=self.metrics))
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


def test_a_text_is_split_as_it_was_written_before_in_this_request_and_in_later_ones(
    asked: Asked,
) -> None:
    asked.open(0, Followed())
    answer: list[int] = []
    for token in (written := letters(BEGINNING)):
        asked.draft(answer)
        answer.append(token)
    asked.draft(answer)
    asked.open(1, Followed())
    assert asked.draft([], slot=1) == written[:16]
    assert min(asked.confidence) > 0.9
    asked.source.close(np.array([0, 1]))
    asked.open(0, Followed())
    assert asked.draft([]) == written[:16]


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"adapter": "b"}, {"cache_salt": "b"}])
def test_it_is_split_as_its_owner_has_written_it_and_nobody_else(
    asked: Asked, other: dict[str, str]
) -> None:
    written = letters(BEGINNING)
    asked.open(0, Followed(), tenant="a")
    asked.draft([])
    asked.draft(written)
    asked.open(1, Followed(), **({"tenant": "a"} | other))
    assert asked.draft([], slot=1) == tokens_of(BEGINNING)
    asked.open(2, Followed(), tenant="a")
    assert asked.draft([], slot=2) == written[:16]


def test_of_a_request_that_may_not_be_learned_nothing_is_known_later(asked: Asked) -> None:
    asked.open(0, Followed(), learn=False)
    asked.draft([])
    asked.draft(letters(BEGINNING))
    asked.open(1, Followed())
    assert asked.draft([], slot=1) == tokens_of(BEGINNING)


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
