"""vLLM's own parsers, fed with the steps of an answer of several tokens each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
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
    "xlam": ("xlam", None, XLAM),
    "reasoning": (None, "deepseek_r1", "I think — first.\n</think>\n\nThe answer is 42 é."),
    "both": ("deepseek_v3", "deepseek_r1", f"I think.\n</think>\n\nOk.{OF_V3}"),
}


@pytest.fixture(autouse=True)
def _vllms_own_method() -> Iterator[None]:
    yield
    DelegatingParser.parse_delta = parsers._parse


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

    def parse(self, sizes: list[int]) -> DeltaMessage:
        parser = self.parser(self.tokenizer, self.request.tools)
        texts = TokenTexts(self.tokenizer, PROMPT)
        parts: list[DeltaMessage] = []
        written, sent, begin = "", 0, 0
        for size in sizes:
            if begin == len(self.tokens):
                break
            tokens = self.tokens[begin : begin + size]
            begin += len(tokens)
            written += "".join(map(texts.next, tokens))
            is_last = begin == len(self.tokens)
            stop = len(self.text) if is_last else max(len(written) - self.held, 0)
            part: Any = parser.parse_delta(
                delta_text=self.text[sent:stop],
                delta_token_ids=tokens,
                request=self.request,
                prompt_token_ids=PROMPT,
                finished=is_last,
            )
            sent = max(sent, stop)
            if part is not None:
                parts.append(part)
        whole = merged(parts)
        assert whole is not None
        for call in whole.tool_calls:
            call.id = None  # random
        return whole


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
    assert whole == DeltaMessage(
        role="assistant",
        reasoning="ab",
        content="cd",
        tool_calls=[call(0, "f", "{}", "id"), call(1, "g", "{}")],
    )
