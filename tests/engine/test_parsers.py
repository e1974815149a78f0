"""vLLM's own parsers, fed with the steps of an answer of several tokens each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses import serving
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.parser_manager import ParserManager

from specserve.engine import parsers
from specserve.engine.parsers import merged, parse_token_by_token
from specserve.engine.token_texts import TokenTexts
from tests.integration.cluster import model_path

PROMPT = [5, 6, 7]
MARKERS = {
    name: f"<\uff5ctool\u2581{name.replace(' ', chr(0x2581))}\uff5c>"
    for name in ("calls begin", "calls end", "call begin", "call end", "sep")
}
WEATHER, TIME = '{"city": "Paris", "days": 3}', '{"zone": "Europe/Paris"}'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "get_time")
]


def deepseek_calls(begin: str, sep: str, end: str) -> str:
    calls = [
        f"{MARKERS['call begin']}{begin}{name}{sep}{arguments}{end}{MARKERS['call end']}"
        for name, arguments in (("get_weather", WEATHER), ("get_time", TIME))
    ]
    return f"{MARKERS['calls begin']}{''.join(calls)}{MARKERS['calls end']}"


OF_V31 = deepseek_calls("", MARKERS["sep"], "")
OF_V3 = deepseek_calls(f"function{MARKERS['sep']}", "\n```json\n", "\n```")
XLAM = (
    f'[{{"name": "get_weather", "arguments": {WEATHER}}}, '
    f'{{"name": "get_time", "arguments": {TIME}}}]'
)
CASES = {
    "deepseek_v31": ("deepseek_v31", None, f"Let me look.{OF_V31}"),
    "deepseek_v3": ("deepseek_v3", None, f"Let me look.{OF_V3}"),
    "text after calls": ("deepseek_v31", None, f"Let me look.{OF_V31} Done."),
    "xlam": ("xlam", None, XLAM),
    "reasoning": (None, "deepseek_r1", "I think — first.\n</think>\n\nThe answer is 42 é."),
    "both": ("deepseek_v3", "deepseek_r1", f"I think.\n</think>\n\nOk.{OF_V3}"),
}


@pytest.fixture(autouse=True)
def _vllms_own_method() -> Iterator[None]:
    yield
    DelegatingParser.parse_delta, serving.split_delta = parsers._parse, parsers._split_fields


class Stream:
    """One answer, streamed through a parser; ``held``: characters that vLLM holds back."""

    def __init__(self, case: str, held: int = 0) -> None:
        tools, reasoning, self.text = CASES[case]
        self.tokenizer = AutoTokenizer.from_pretrained(model_path("demo-base"))
        self.tokenizer.add_tokens([*MARKERS.values(), "<think>", "</think>"])
        self.parser = ParserManager.get_parser(
            tools, reasoning, enable_auto_tools=tools is not None, tokenizer=self.tokenizer
        )
        self.tokens = self.tokenizer.encode(self.text, add_special_tokens=False)
        self.request = ChatCompletionRequest(
            messages=[{"role": "user", "content": "x"}],
            skip_special_tokens=False,
            **({"tools": TOOLS, "tool_choice": "auto"} if tools else {}),
        )
        self.held = held

    def messages(self, sizes: list[int]) -> list[DeltaMessage]:
        """What the parser returns for each step."""
        parser = self.parser(self.tokenizer, self.request.tools)
        texts = TokenTexts(self.tokenizer, PROMPT)
        found: list[DeltaMessage] = []
        written, sent, begin = "", 0, 0
        for size in sizes:
            if begin == len(self.tokens):
                break
            tokens = self.tokens[begin : begin + size]
            begin += len(tokens)
            written += "".join(map(texts.next, tokens))
            is_last = begin == len(self.tokens)
            stop = len(self.text) if is_last else max(len(written) - self.held, 0)
            message: Any = parser.parse_delta(
                delta_text=self.text[sent:stop],
                delta_token_ids=tokens,
                request=self.request,
                prompt_token_ids=PROMPT,
                finished=is_last,
            )
            sent = max(sent, stop)
            if message is not None:
                found.append(message)
        return found

    def parse(self, sizes: list[int]) -> dict[str, Any]:
        """The whole answer; the ids of its calls are random."""
        whole = merged(self.messages(sizes))
        assert whole is not None
        answer: dict[str, Any] = whole.model_dump(exclude_none=True)
        for call in answer.get("tool_calls", ()):
            del call["id"]
        return answer


def items_of(messages: list[DeltaMessage]) -> list[tuple[str, str]]:
    """What ``/v1/responses`` makes of a stream: calls with their arguments, and texts, in order."""
    processor = SimpleStreamingEventProcessor()
    output = SimpleNamespace(token_ids=[], logprobs=None)
    for delta in chain.from_iterable(map(serving.split_delta, messages)):
        state, call = processor.resolve_target_state(delta)
        if state.name == "NONE":
            continue
        if processor.needs_transition(state, call):
            processor.close_current()
            processor.open(state, call)
        processor.emit_delta(delta, output, lambda _: [])
    processor.close_current()
    return [
        (each.name, each.arguments) if each.type == "function_call" else ("", each.content[0].text)
        for each in processor.output_items
    ]


def random_sizes(rng: random.Random, total: int) -> list[int]:
    sizes: list[int] = []
    while total:
        sizes.append(min(rng.choice([1, 1, 2, 4, 9, 17, 33]), total))
        total -= sizes[-1]
    return sizes


@pytest.mark.parametrize("held", [0, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_streamed_answer_does_not_depend_on_the_size_of_steps(case: str, held: int) -> None:
    expected = Stream(case).parse([1] * 99)
    stream = Stream(case, held)
    parse_token_by_token()
    for seed in range(40):
        sizes = random_sizes(random.Random(seed), len(stream.tokens))
        assert stream.parse(sizes) == expected, sizes


@pytest.mark.parametrize("case", ["deepseek_v31", "text after calls"])
def test_a_response_has_calls_and_texts_in_their_order(case: str) -> None:
    stream = Stream(case)
    expected = items_of(stream.messages([1] * 99))
    assert ("get_weather", WEATHER) in expected
    parse_token_by_token()
    for seed in range(40):
        sizes = random_sizes(random.Random(seed), len(stream.tokens))
        assert items_of(stream.messages(sizes)) == expected, sizes


def test_the_texts_of_a_step_are_one_message_unless_a_call_is_between_them() -> None:
    texts = [DeltaMessage(content=text) for text in "abc"]
    call = DeltaMessage(tool_calls=[DeltaToolCall(index=0, id="a")])
    parse_token_by_token()
    whole = merged([*texts[:2], call, texts[2]])
    assert whole is not None
    found = serving.split_delta(whole)
    assert [each.content for each in found] == ["ab", None, "c"]
    assert found[1].tool_calls == call.tool_calls


def test_a_response_without_parallel_calls_has_only_the_first() -> None:
    calls = [DeltaToolCall(index=index, id="a") for index in (0, 1)]
    whole = merged([DeltaMessage(tool_calls=[call]) for call in calls])
    assert whole is not None
    whole.tool_calls = whole.tool_calls[:1]  # as vLLM does
    parse_token_by_token()
    assert serving.split_delta(whole) == [DeltaMessage(tool_calls=calls[:1])]


def test_long_reasoning_is_parsed_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, sizes = Stream("reasoning"), []

    def count(parser: Any, text: str, tokens: list[int], *args: Any, **options: Any) -> Any:
        sizes.append(len(tokens))
        return vllms(parser, text, tokens, *args, **options)

    vllms = parsers._parse
    monkeypatch.setattr(parsers, "_parse", count)
    parse_token_by_token()
    stream.parse([1, 4, 99])
    assert sizes[:2] == [1, 4]  # the rest has the end of the reasoning
    assert set(sizes[2:]) == {1}


def test_text_of_other_rules_than_the_requests_is_parsed_as_vllm_does() -> None:
    stream = Stream("deepseek_v31")
    expected = stream.parse([5] * 99)
    parse_token_by_token()
    stream.request.skip_special_tokens = True  # and the text has special tokens all the same
    stream.tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS.values())})
    assert stream.parse([5] * 99) == expected


def test_vllm_itself_loses_text_in_steps_of_several_tokens() -> None:
    stream = Stream("deepseek_v31")
    assert stream.parse([1] * 99) != stream.parse([6] * 99)


def test_pieces_of_one_message_are_merged() -> None:
    def call(index: int, name: str | None, arguments: str, id: str | None = None) -> DeltaToolCall:
        return DeltaToolCall(
            index=index, id=id, function=DeltaFunctionCall(name=name, arguments=arguments)
        )

    assert merged([]) is None
    whole = merged(
        [
            DeltaMessage(role="assistant", reasoning="a"),
            DeltaMessage(reasoning="b", content="c"),
            DeltaMessage(content="d", tool_calls=[call(0, "f", "{", "id")]),
            DeltaMessage(tool_calls=[call(0, None, "}"), call(1, "g", "{}")]),
        ]
    )
    assert whole is not None
    assert (
        whole.model_dump()
        == DeltaMessage(
            role="assistant",
            reasoning="ab",
            content="cd",
            tool_calls=[call(0, "f", "{}", "id"), call(1, "g", "{}")],
        ).model_dump()
    )
