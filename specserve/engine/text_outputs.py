"""Converts vLLM's outputs into those of the generation API."""

from __future__ import annotations

from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from specserve.core.errors import GenerationError
from specserve.engine.text_request import (
    Asked,
    Continuation,
    FinishReason,
    Output,
    PromptToken,
    Token,
)
from specserve.engine.token_texts import TokenTexts


class OutputReader:
    """Converts the outputs of one request."""

    def __init__(self, asked: Asked, tokenizer: Any) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._texts: dict[int, TokenTexts] = {}  # by the index of a continuation

    def read(self, output: RequestOutput) -> Output:
        """Converts one output.

        Raises:
            GenerationError: the engine has failed or has aborted the request.
        """
        prompt: list[int] = output.prompt_token_ids
        return Output(
            num_prompt_tokens=len(prompt),
            prompt_tokens=self._prompt_tokens(output) if output.prompt_logprobs else (),
            continuations=tuple(self._continuation(prompt, each) for each in output.outputs),
        )

    def _prompt_tokens(self, output: RequestOutput) -> tuple[PromptToken, ...]:
        first, *others = output.prompt_token_ids
        (text,) = convert_ids_list_to_tokens(self._tokenizer, [first])
        _, *entries = output.prompt_logprobs
        return (
            PromptToken(first, text, None),
            *(
                PromptToken(token, entry[token].decoded_token, entry[token].logprob)
                for token, entry in zip(others, entries, strict=True)
            ),
        )

    def _continuation(self, prompt: list[int], output: CompletionOutput) -> Continuation:
        tokens: list[Token] = []
        top_tokens: list[tuple[Token, ...]] = []
        if self._asked.with_tokens:
            texts = self._texts.get(output.index)
            if texts is None:
                texts = self._texts[output.index] = TokenTexts(self._tokenizer, prompt)
            for token, entries in zip(output.token_ids, output.logprobs or (), strict=True):
                logprob = entries[token].logprob
                tokens.append(Token(token, texts.next(token), logprob, token in texts.special))
                if most := self._asked.given.top_n_tokens:
                    top_tokens.append(_top_tokens(entries, most, texts.special))
        return Continuation(
            text=output.text,
            num_tokens=len(output.token_ids),
            tokens=tuple(tokens),
            top_tokens=tuple(top_tokens),
            mean_logprob=(output.cumulative_logprob or 0.0) / max(len(output.token_ids), 1),
            finish_reason=_finish_reason(output),
            speculation=output.spec_decode_metrics and output.spec_decode_metrics.to_dict(),
        )


def _top_tokens(
    entries: dict[int, Logprob], most: int, special: frozenset[int]
) -> tuple[Token, ...]:
    """The most likely tokens of a position. ``entries`` may also contain the sampled token."""
    likely = sorted(entries.items(), key=lambda item: item[1].rank)[:most]
    return tuple(
        Token(token, entry.decoded_token, entry.logprob, token in special)
        for token, entry in likely
    )


def _finish_reason(output: CompletionOutput) -> FinishReason | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return "length"
        case "stop":
            return "stop_sequence" if isinstance(output.stop_reason, str) else "eos_token"
        case "error":
            raise GenerationError("generation", "Request failed during generation: engine error")
    raise GenerationError("incomplete_generation", "Incomplete generation")
