"""The text of each generated token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

_CONTEXT_TOKENS = 16
"""Prompt tokens given to the detokenizer; no character consists of more tokens."""


class TokenTexts:
    """Text of each token of an answer, by vLLM's detokenizer.

    Args:
        tokenizer: of the model.
        prompt: the tokens before the answer.
        skip_special_tokens: whether special tokens have no text.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool = False
    ) -> None:
        self.special: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self._detokenizer = IncrementalDetokenizer.from_new_request(
            tokenizer,
            EngineCoreRequest(
                request_id="",
                prompt_token_ids=list(prompt[-_CONTEXT_TOKENS:]),
                mm_features=None,
                sampling_params=SamplingParams(skip_special_tokens=skip_special_tokens),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
        )

    def next(self, token: int) -> str:
        """Returns the text that the next token adds."""
        self._detokenizer.update([token], stop_terminated=False)
        text: str = self._detokenizer.get_next_output_text(finished=False, delta=True)
        return text
