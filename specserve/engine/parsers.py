"""Parsers of reasoning and tool calls, fed one token at a time.

A step with drafts writes several tokens, and a client that reads slowly gets those of several steps
at once. Many of vLLM 0.32's parsers count at most one marker in a call: they would lose text, or a
brace of a call's arguments (https://github.com/vllm-project/vllm/issues/48020).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.parser.abstract_parser import DelegatingParser

from specserve.engine.token_texts import TokenTexts


def parse_token_by_token() -> None:
    """Makes vLLM's routes feed the parsers that need it token by token."""
    DelegatingParser.parse_delta = _parse_tokens


_parse = DelegatingParser.parse_delta


def _parse_tokens(
    parser: Any,
    delta_text: str,
    delta_token_ids: list[int],
    request: Any,
    prompt_token_ids: list[int] | None = None,
    *,
    finished: bool,
) -> DeltaMessage | None:
    """vLLM's ``parse_delta``: what some new text of a stream adds to the answer."""
    if parser._engine_based:
        return _parse(
            parser, delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
    stream = getattr(parser, "specserve_stream", None)
    if stream is None:
        skips = request.skip_special_tokens
        texts = TokenTexts(
            parser.model_tokenizer, prompt_token_ids or (), skip_special_tokens=skips
        )
        parser.specserve_stream = stream = _Stream(texts)
    pieces = stream.add(delta_text, delta_token_ids, finished=finished)
    last = len(pieces) - 1
    parts = [
        _parse(parser, text, tokens, request, prompt_token_ids, finished=finished and each == last)
        for each, (text, tokens) in enumerate(pieces)
    ]
    return merged([part for part in parts if part is not None])


class _Stream:
    """The tokens of an answer that the parser has not seen, and their text as far as it is known.

    vLLM holds text back while it may be the beginning of a stop string. A token waits for its text.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._text = ""
        self._waiting: list[tuple[int, int]] = []  # (token, characters of its text)

    def add(
        self, text: str, tokens: Sequence[int], *, finished: bool
    ) -> list[tuple[str, list[int]]]:
        """Adds new text and tokens; returns each token that has its text now, with this text."""
        self._text += text
        self._waiting += [(token, len(self._texts.next(token))) for token in tokens]
        pieces, begin = [], 0
        for token, length in self._waiting:
            if begin + length > len(self._text) and not finished:
                break
            pieces.append((self._text[begin : begin + length], [token]))
            begin += length
        del self._waiting[: len(pieces)]
        self._text = self._text[begin:]
        if finished:
            before, of_last = pieces.pop() if pieces else ("", [])
            pieces.append((before + self._text, of_last))
        return pieces


def merged(parts: Sequence[DeltaMessage]) -> DeltaMessage | None:
    """One message with the content of all; None if there is none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    calls: dict[int, list[DeltaToolCall]] = {}
    for call in chain.from_iterable(part.tool_calls for part in parts):
        calls.setdefault(call.index, []).append(call)
    return DeltaMessage(
        **_given("role", parts, of_first=True),
        **_given("content", parts),
        **_given("reasoning", parts),
        tool_calls=[_merged_call(each) for each in calls.values()],
    )


def _merged_call(parts: Sequence[DeltaToolCall]) -> DeltaToolCall:
    """The call that these pieces of equal index are parts of."""
    functions = [part.function for part in parts if part.function is not None]
    function = DeltaFunctionCall(**_given("name", functions), **_given("arguments", functions))
    return DeltaToolCall(
        index=parts[0].index,
        **_given("id", parts, of_first=True),
        **_given("type", parts, of_first=True),
        function=function if functions else None,
    )


def _given(name: str, parts: Sequence[Any], *, of_first: bool = False) -> dict[str, Any]:
    """The field of the whole, if any part has it: vLLM writes all fields that are set."""
    found = [value for part in parts if (value := getattr(part, name)) is not None]
    if not found:
        return {}
    return {name: found[0] if of_first else "".join(found)}
