"""Drafts of the text that a grammar forces, with real xgrammar matchers."""

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

from specserve.core.errors import GrammarError
from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import GrammarConfig
from specserve.core.token_texts import TokenTexts
from specserve.core.types import Int32Array, RequestControls
from specserve.sources import passing_reasons
from specserve.sources.base import SourceContext
from specserve.sources.grammar import GrammarSource
from tests.draft_batches import draft_batch, propose
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
    """The text split into one token per character."""
    return [token for each in text for token in tokens_of(each)]


class Grammar:
    """A request's grammar, as the engine passes it."""

    def __init__(self, schema: object = SCHEMA) -> None:
        self.matcher = GrammarMatcher(compiled(json.dumps(schema)))
        self.texts = token_texts()
        self.num_searches = self._num_seen = 0
        self.is_closed = False

    def forced(self, answer: Int32Array) -> str:
        self.num_searches += 1
        for token in answer[self._num_seen :].tolist():
            if not self.matcher.accept_token(token):
                raise ValueError(f"refused: {token}")
        self._num_seen = len(answer)
        return "" if self.matcher.is_terminated() else self.matcher.find_jump_forward_string()

    def usual(self, answer: Int32Array, text: str) -> list[int]:
        return tokens_of(text)

    def close(self) -> None:
        self.is_closed = True


class Asked:
    """The source, called for one request at a time."""

    def __init__(self, max_draft_len: int = 16) -> None:
        self.metrics = SpeculationMetrics(("grammar",))
        config = GrammarConfig(kind="grammar", max_draft_len=max_draft_len)
        self.source = GrammarSource(config, SourceContext(num_slots=4, metrics=self.metrics))
        self.longest = max_draft_len
        self.confidence: list[float] = []

    def open(self, slot: int, grammar: Grammar, **controls: Any) -> None:
        self.source.open(slot, RequestControls(grammar=grammar, **controls))

    def draft(self, answer: Sequence[int], *, slot: int = 0, limit: int = 128) -> list[int]:
        """The source's draft after this answer."""
        batch = draft_batch({slot: [*PROMPT, *answer]}, num_prompt_tokens=len(PROMPT))
        found = propose(self.source, batch, np.array([min(limit, self.longest)], np.int32))
        length = int(found.lengths[0])
        self.confidence = found.confidence[0, :length].tolist()
        return list(found.tokens[0, :length].tolist())


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_the_forced_text_is_drafted_up_to_the_first_free_token(asked: Asked) -> None:
    asked.open(0, Grammar())
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


def test_a_repeated_call_gets_the_same_draft_and_limits_cut_it(asked: Asked) -> None:
    asked.open(0, Grammar())
    expected = tokens_of(BEGINNING)
    assert [asked.draft([]), asked.draft([], limit=3), asked.draft([], limit=0)] == [
        expected,
        expected[:3],
        [],
    ]
    assert asked.draft([]) == expected
    short = Asked(max_draft_len=2)
    short.open(0, Grammar())
    assert short.draft([]) == expected[:2]


def test_later_requests_split_a_text_as_it_was_written_before(
    asked: Asked,
) -> None:
    asked.open(0, Grammar())
    answer: list[int] = []
    for token in (written := letters(BEGINNING)):
        asked.draft(answer)
        answer.append(token)
    asked.draft(answer)
    asked.open(1, Grammar())
    assert asked.draft([], slot=1) == written[:16]
    assert min(asked.confidence) > 0.9
    asked.source.close(np.array([0, 1]))
    asked.open(0, Grammar())
    assert asked.draft([]) == written[:16]


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"adapter": "b"}, {"cache_salt": "b"}])
def test_a_text_is_split_as_its_owner_wrote_it(asked: Asked, other: dict[str, str]) -> None:
    written = letters(BEGINNING)
    asked.open(0, Grammar(), tenant="a")
    asked.draft([])
    asked.draft(written)
    asked.open(1, Grammar(), **({"tenant": "a"} | other))
    assert asked.draft([], slot=1) == tokens_of(BEGINNING)
    asked.open(2, Grammar(), tenant="a")
    assert asked.draft([], slot=2) == written[:16]


def test_no_split_is_learned_from_a_request_without_learn(asked: Asked) -> None:
    asked.open(0, Grammar(), learn=False)
    asked.draft([])
    asked.draft(letters(BEGINNING))
    asked.open(1, Grammar())
    assert asked.draft([], slot=1) == tokens_of(BEGINNING)


def test_a_forced_text_is_searched_for_once(asked: Asked) -> None:
    grammar = Grammar()
    asked.open(0, grammar)
    expected = tokens_of(BEGINNING)
    drafts = [asked.draft(expected[:size], limit=4) for size in range(len(expected))]
    assert drafts == [expected[size : size + 4] for size in range(len(expected))]
    assert grammar.num_searches == 1
    assert asked.draft(expected) == []
    assert grammar.num_searches == 2


def test_nothing_is_searched_for_a_request_that_takes_no_draft_now(asked: Asked) -> None:
    grammar = Grammar()
    asked.open(0, grammar)
    assert asked.draft([], limit=0) == []
    assert grammar.num_searches == 0


def test_nothing_is_drafted_after_the_grammars_end(asked: Asked) -> None:
    asked.open(0, Grammar({"const": "yes"}))
    whole = tokens_of('"yes"')
    assert asked.draft([]) == whole
    assert asked.draft(whole) == []
    assert asked.draft([*whole, tokenizer().eos_token_id]) == []


def test_tokens_of_skipped_steps_are_followed_later(asked: Asked) -> None:
    asked.open(0, Grammar())
    asked.draft([])
    answer = tokens_of('{"house_number":1,"street_name":"a","country":"Ge')
    assert tokenizer().decode(asked.draft(answer)) == 'rmany"}'


def test_a_grammar_that_fails_stops_drafts_of_its_request_only(asked: Asked) -> None:
    asked.open(0, Grammar())
    asked.open(1, Grammar())
    batch = draft_batch({0: [*PROMPT, *tokens_of("no")], 1: PROMPT}, num_prompt_tokens=len(PROMPT))
    limits = np.full(2, 16, np.int32)
    for _ in range(2):
        assert propose(asked.source, batch, limits).lengths.tolist() == [
            0,
            len(tokens_of(BEGINNING)),
        ]
    (health,) = asked.metrics.snapshot().health
    assert (health.up, health.num_errors) == (True, 1)
    assert health.reason == "a request's grammar is not followed: ValueError, see the log"
    asked.source.close(np.array([0]))
    asked.open(0, Grammar())
    assert asked.draft([]) == tokens_of(BEGINNING)


class Endless(Grammar):
    """A grammar that the engine refuses to follow."""

    def forced(self, answer: Int32Array) -> str:
        raise GrammarError("it may have no end")


def test_refused_grammars_are_logged_once_and_their_reason_is_not_shown_for_ever(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "a request's grammar is not followed: it may have no end"
    for _ in range(3):
        asked.open(0, Endless())
        assert asked.draft([]) == []
        assert asked.metrics.snapshot().health[0].reason == reason
    (line,) = caplog.records
    assert (line.getMessage(), line.exc_info) == (f"No drafts from the grammar: {reason}", None)
    monkeypatch.setattr(passing_reasons, "SHOWN_S", -1.0)
    asked.open(0, Grammar())
    assert asked.metrics.snapshot().health[0].reason == ""


def test_requests_without_a_grammar_or_grammar_drafts_get_none(
    asked: Asked,
) -> None:
    asked.open(0, Grammar(), speculation="ngram")
    asked.open(1, Grammar(), max_draft_tokens=0)
    asked.source.open(2, RequestControls())
    assert [asked.draft([], slot=slot) for slot in range(3)] == [[], [], []]


def test_an_ended_request_leaves_no_grammar(asked: Asked) -> None:
    grammar = Grammar()
    left = weakref.ref(grammar)
    asked.open(0, grammar)
    asked.draft([])
    asked.source.close(np.array([0]))
    assert grammar.is_closed
    del grammar
    gc.collect()
    assert left() is None
    assert asked.draft([]) == []
