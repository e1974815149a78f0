"""Our own copies of the scheduler's grammars, compiled and followed by vLLM's code."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.config import ModelConfig, StructuredOutputsConfig, VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from specserve.core.errors import GrammarError
from specserve.engine.grammars import Grammars, RequestGrammar
from specserve.sources.controls import REASONING_KEY
from tests.integration.cluster import model_path

SCHEMA = {"enum": ["Germany", "Greece"]}
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig(model=str(model_path("demo-draft")), dtype="float32", max_model_len=256)


@pytest.fixture(scope="module")
def grammars(model: ModelConfig) -> Iterator[Grammars]:
    grammars = Grammars(VllmConfig(model_config=model))
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("demo-draft"))


def asked(backend: str = "xgrammar", prompt: list[int] | None = None, **outputs: Any) -> Any:
    """A request as the model runner has it."""
    wanted = StructuredOutputsParams(**(outputs or {"json": json.dumps(SCHEMA)}))
    wanted._backend = backend
    params = SamplingParams(max_tokens=64, structured_outputs=wanted)
    return SimpleNamespace(sampling_params=params, prompt_token_ids=prompt or [7, 8, 9])


def test_the_thread_starts_before_the_first_step(grammars: Grammars) -> None:
    assert [thread for thread in threading.enumerate() if thread.name.startswith("grammars")]


def compiled(grammar: RequestGrammar | None) -> RequestGrammar:
    """Waits for the compilation and the check after it, and returns the grammar."""
    assert grammar is not None
    structured = grammar._given.result(TIMEOUT_S)[0].structured_output_request
    assert structured is not None
    if isinstance(pending := structured._grammar, Future):
        pending.exception(TIMEOUT_S)
    with suppress(RuntimeError):  # it cannot be compiled
        grammar.forced(np.zeros(0, np.int32))
        assert grammar._shortest is not None
        grammar._shortest.result(TIMEOUT_S)
    return grammar


def tokens(tokenizer: Any, text: str) -> Any:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


@pytest.mark.parametrize(
    ("outputs", "written", "forced"),
    [
        ({"json": json.dumps(SCHEMA)}, '"Ge', 'rmany"'),
        ({"regex": "(ab|cd)efgh"}, "a", "befgh"),
        ({"grammar": 'root ::= "SELECT " ("a" | "b") " FROM table"'}, "SELECT a", " FROM table"),
    ],
)
def test_the_forced_text_after_an_answer_is_found(
    grammars: Grammars, tokenizer: Any, outputs: dict[str, Any], written: str, forced: str
) -> None:
    grammar = compiled(grammars.open("a", asked(**outputs)))
    answer = tokens(tokenizer, written)
    for size in range(1, len(answer) + 1):
        text = grammar.forced(answer[:size])
    assert text == forced
    whole = np.append(answer, [*tokens(tokenizer, forced), tokenizer.eos_token_id])
    assert grammar.forced(whole) == ""


def test_the_vocabulary_has_the_bytes_of_all_tokens_but_end_tokens(
    grammars: Grammars, tokenizer: Any
) -> None:
    texts = compiled(grammars.open("a", asked())).texts
    for text in (" name", "\u4e2d"):
        (first, *_) = written = tokens(tokenizer, text)
        assert sum(texts.size(token, text.encode()) > 0 for token in written) >= 1
        assert first in texts.beginnings(text.encode())
    end = tokenizer.decode([tokenizer.eos_token_id]).encode()
    assert tokenizer.eos_token_id not in texts.beginnings(end)


def test_a_request_without_an_xgrammar_grammar_gets_none(grammars: Grammars) -> None:
    free = SimpleNamespace(sampling_params=SamplingParams(), prompt_token_ids=[1])
    embedded = asked()
    embedded.prompt_token_ids = None
    for each in (free, asked("guidance"), embedded):
        assert grammars.open("a", each) is None


def test_nothing_is_forced_while_the_grammar_compiles(grammars: Grammars, tokenizer: Any) -> None:
    grammar = compiled(grammars.open("a", asked()))
    given: Future[Any] = Future()
    waiting = RequestGrammar(grammars._manager, given, tokenizer, grammars._thread)
    answer = tokens(tokenizer, '"Ge')
    assert waiting.forced(answer) == ""
    given.set_result(grammar._given.result())
    assert compiled(waiting).forced(answer) == 'rmany"'


@pytest.mark.parametrize("is_followed", [False, True])
def test_an_aborted_request_leaves_no_grammar_in_memory(
    grammars: Grammars, tokenizer: Any, is_followed: bool
) -> None:
    grammar = grammars.open("a", asked())
    assert grammar is not None
    if is_followed:
        assert compiled(grammar).forced(tokens(tokenizer, '"Ge'))
    given = grammar._given
    left = weakref.ref(grammar)
    del grammar
    request = weakref.ref(given.result(TIMEOUT_S)[0])
    compiling = given.result()[0].structured_output_request._grammar
    if isinstance(compiling, Future):
        compiling.result(TIMEOUT_S)
    del given, compiling
    grammars._thread.submit(lambda: None).result(TIMEOUT_S)  # drops the thread's last job
    gc.collect()
    assert (left(), request()) == (None, None)


def test_what_an_aborted_request_waits_for_is_not_computed(grammars: Grammars) -> None:
    held = threading.Event()
    searched = compiled(grammars.open("a", asked(regex="a|b")))
    given = grammars.open("b", asked(regex="aa|b"))
    assert given is not None
    given._given.result(TIMEOUT_S)
    grammars._thread.submit(held.wait)
    waiting = grammars.open("c", asked())
    assert waiting is not None
    searched._shortest = grammars._thread.submit(int)
    structured: Any = given._given.result()[0].structured_output_request
    structured._grammar = Future()
    for each in (searched, given, waiting):
        each.close()
    held.set()
    assert waiting._given.cancelled()
    assert searched._shortest.cancelled()
    assert structured._grammar.cancelled()


def test_vllms_scheduler_cuts_a_draft_where_the_grammar_refuses_it(
    grammars: Grammars, tokenizer: Any
) -> None:
    grammar = compiled(grammars.open("a", asked(regex="(the )+end")))
    written = tokens(tokenizer, "the ")
    grammar.forced(written)
    request, _ = grammar._given.result()
    scheduler: Any = SimpleNamespace(
        requests={"a": request}, structured_output_manager=grammars._manager
    )
    allowed, refused = (tokens(tokenizer, text).tolist() for text in ("the the", " cat"))
    for draft in (allowed, [*allowed, *refused], refused):
        Scheduler.update_draft_token_ids(scheduler, DraftTokenIds(["a"], [draft]))
        assert request.spec_token_ids == [token for token in draft if token in allowed]


def test_a_grammar_that_cannot_be_compiled_or_followed_is_an_error(
    grammars: Grammars, tokenizer: Any
) -> None:
    wrong = compiled(grammars.open("a", asked(grammar="root ::= nothing")))
    with pytest.raises(RuntimeError, match='"nothing" is not defined'):
        wrong.forced(tokens(tokenizer, "a"))
    grammar = compiled(grammars.open("b", asked()))
    with pytest.raises(ValueError, match="the grammar refuses the answer's tokens"):
        grammar.forced(tokens(tokenizer, "France"))


@pytest.mark.parametrize(
    "outputs",
    [
        {"grammar": 'root ::= "a" x\nx ::= "b" root'},
        {
            "json": json.dumps(
                {
                    "type": "object",
                    "properties": {"n": {"$ref": "#"}},
                    "required": ["n"],
                    "additionalProperties": False,
                }
            )
        },
        {"regex": "(a{999}){999}"},
    ],
)
def test_a_grammar_whose_forced_text_has_no_end_is_not_followed(
    grammars: Grammars, tokenizer: Any, outputs: dict[str, Any]
) -> None:
    grammar = compiled(grammars.open("a", asked(**outputs)))
    with pytest.raises(GrammarError, match="may match no text of up to 8192 bytes"):
        grammar.forced(tokens(tokenizer, ""))


def test_the_forced_text_ends_before_a_character_that_is_forced_in_part(
    grammars: Grammars, tokenizer: Any
) -> None:
    grammar = compiled(grammars.open("a", asked(regex="x\u0430\u043d(\u0434\u0430|\u043d\u0435)")))
    assert grammar.forced(tokens(tokenizer, "x")) == "\u0430\u043d"
    within = tokens(tokenizer, "x\u0430\u043d\u0434")[:-1]
    assert tokenizer.decode(within).endswith("\ufffd")
    assert grammar.forced(within) == ""


def test_a_forced_text_gets_the_tokens_that_the_tokenizer_gives_the_whole(
    grammars: Grammars, tokenizer: Any
) -> None:
    grammar = compiled(grammars.open("a", asked()))
    whole, rest = tokens(tokenizer, '{"street_name":"'), 'name":"'
    written = tokens(tokenizer, '{"street_')
    assert written.tolist() == whole[: len(written)].tolist()
    assert grammar.usual(written, rest) == whole[len(written) :].tolist()
    assert grammar.usual(written[:0], '{"street_name":"') == whole.tolist()


def test_a_forced_text_is_tokenized_alone_if_the_answers_end_would_change(
    grammars: Grammars, tokenizer: Any
) -> None:
    grammar = compiled(grammars.open("a", asked()))
    assert tokens(tokenizer, "name").tolist() != tokens(tokenizer, "n").tolist()
    assert grammar.usual(tokens(tokenizer, '"n'), "ame") == tokens(tokenizer, "ame").tolist()


def test_the_grammar_starts_at_the_end_of_the_reasoning(model: ModelConfig, tokenizer: Any) -> None:
    options = StructuredOutputsConfig(backend="xgrammar", reasoning_parser="deepseek_r1")
    config = VllmConfig(model_config=model, structured_outputs_config=options)
    grammars = Grammars(config)
    end = tokens(tokenizer, "<|system|>")
    assert len(end) == 1

    class Reasoner:
        """A reasoning parser whose end token is in the small model's vocabulary."""

        def __init__(self, *args: Any, thinking: bool = False, **options: Any) -> None:
            self._thinks = thinking

        def is_reasoning_end(self, token_ids: Any) -> bool:
            return not self._thinks or int(end[0]) in list(token_ids)

        def is_reasoning_end_streaming(self, token_ids: Any, new: Any) -> bool:
            return int(end[0]) in list(new)

    grammars._manager.reasoner_cls = Reasoner
    thinking = asked()
    thinking.sampling_params.extra_args = {REASONING_KEY: [None, {"thinking": True}]}
    grammar = compiled(grammars.open("a", thinking))
    thought = tokens(tokenizer, "So it is Greece.")
    assert grammar.forced(thought) == ""
    answer = np.concatenate([thought, end, tokens(tokenizer, '"Gr')])
    assert grammar.forced(answer) == 'eece"'
    grammars.close()
