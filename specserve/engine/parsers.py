"""Parsers of reasoning and tool calls, fed one token at a time.

A step with drafts writes several tokens, and a client that reads slowly gets those of several steps
at once. Many of vLLM 0.32's parsers count at most one marker in a call: they would lose text, or a
brace of a call's arguments (https://github.com/vllm-project/vllm/issues/48020).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

from pydantic import PrivateAttr
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.responses import serving
from vllm.parser.abstract_parser import DelegatingParser
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

from specserve.engine.token_texts import TokenTexts

Piece = tuple[str, list[int]]
"""Some text of an answer and its tokens."""


def parse_token_by_token() -> None:
    """Makes vLLM's routes feed the parsers that need it token by token."""
    DelegatingParser.parse_delta = _parse_tokens
    serving.split_delta = _split


_parse, _split_fields = DelegatingParser.parse_delta, serving.split_delta


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
    whole = _joined(pieces)
    if not _needs_tokens(parser, whole[1]):
        pieces = [whole]
    last = len(pieces) - 1
    parts = [
        _parse(parser, text, tokens, request, prompt_token_ids, finished=finished and each == last)
        for each, (text, tokens) in enumerate(pieces)
    ]
    return merged([part for part in parts if part is not None])


def _needs_tokens(parser: Any, tokens: Sequence[int]) -> bool:
    """Whether a parser may have to see these tokens one by one.

    Not within reasoning, nor in an answer without tools: each call costs time that grows with the
    text before it.
    """
    state = parser._stream_state
    if not state.prompt_reasoning_checked:  # the first tokens
        return True
    if state.reasoning_ended:
        return parser._tool_parser is not None
    reasoning = parser._reasoning_parser
    if not isinstance(reasoning, BaseThinkingReasoningParser):
        return True
    return reasoning.start_token_id in tokens or reasoning.end_token_id in tokens


class _Stream:
    """The tokens of an answer that the parser has not seen, and their text as far as it is known.

    vLLM holds text back while it may be the beginning of a stop string. A token waits for its text.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._text = ""
        self._waiting: deque[tuple[int, str]] = deque()  # (token, its text)
        self._is_exact = True  # whether the tokens' texts are those that came

    def add(self, text: str, tokens: Sequence[int], *, finished: bool) -> list[Piece]:
        """Adds new text and tokens; returns each token that has its text now, with this text.

        If the text is not that of the tokens, as at a stop string, all come in one piece.
        """
        self._text += text
        self._waiting.extend((token, self._texts.next(token)) for token in tokens)
        pieces: list[Piece] = []
        while self._waiting and self._is_exact:
            token, own = self._waiting[0]
            if not self._text.startswith(own):
                self._is_exact = own.startswith(self._text)
                break
            pieces.append((own, [token]))
            self._waiting.popleft()
            self._text = self._text[len(own) :]
        if finished or not self._is_exact:
            if self._text or self._waiting or not pieces:
                pieces.append((self._text, [token for token, _ in self._waiting]))
            self._text = ""
            self._waiting.clear()
        return pieces


def _joined(pieces: Sequence[Piece]) -> Piece:
    return "".join(text for text, _ in pieces), [token for _, each in pieces for token in each]


class _Merged(DeltaMessage):
    """A message with the content of several, which keeps these in their order."""

    _parts: list[DeltaMessage] = PrivateAttr(default_factory=list)


def _split(delta: DeltaMessage) -> list[DeltaMessage]:
    """vLLM's ``split_delta`` for typed events. It would move text before a call that it follows.

    Adjacent texts are one message, since vLLM gives each text the log-probabilities of all tokens.
    """
    if not isinstance(delta, _Merged):
        return _split_fields(delta)  # type: ignore[no-any-return]
    kept = {call.index for call in delta.tool_calls or ()}  # one with `parallel_tool_calls: false`
    parts: list[DeltaMessage] = []
    for is_text, group in groupby(delta._parts, _is_text):
        texts = list(group)
        if is_text:
            texts = [texts[0].model_copy(update=_given("content", texts))]
        parts += texts
    found = []
    for part in parts:
        calls = [call for call in part.tool_calls or () if call.index in kept]
        if calls or part.content is not None or part.reasoning is not None:
            found += _split_fields(part.model_copy(update={"tool_calls": calls}))
    return found


def _is_text(part: DeltaMessage) -> bool:
    return part.content is not None and part.reasoning is None and not part.tool_calls


def merged(parts: Sequence[DeltaMessage]) -> DeltaMessage | None:
    """One message with the content of all; None if there is none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    calls: dict[int, list[DeltaToolCall]] = {}
    for call in chain.from_iterable(part.tool_calls or () for part in parts):
        calls.setdefault(call.index, []).append(call)
    whole = _Merged(
        **_given("role", parts, of_first=True),
        **_given("content", parts),
        **_given("reasoning", parts),
        tool_calls=[_merged_call(each) for each in calls.values()],
    )
    whole._parts = list(parts)
    return whole


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
