"""Counts accepted and rejected tokens of a call's predicted answer.

The HTTP side sets the current call's prediction (:data:`CURRENT_PREDICTION`). vLLM's handlers call
the engine's client in the same context. The client compares the answer with the prediction. Then
the handlers write the counts into the answer's ``usage``, again in this context.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from specserve.core.types import Int32Array


@dataclass(slots=True)
class Prediction:
    """The prediction of one call, which may have several answers.

    Attributes:
        token_ids: int32 ``[m]``.
        num_accepted: answer tokens that it predicted, over all answers.
        num_rejected: predicted tokens that an answer does not contain, over all answers.
        num_running: requests of the call whose answers are not counted yet.
    """

    token_ids: Int32Array
    num_accepted: int = 0
    num_rejected: int = 0
    num_running: int = 0

    def count(self, answer: Sequence[int]) -> None:
        """Adds the accepted and rejected tokens of one answer, given as token ids."""
        # Imported here: numba takes seconds to import, and most applications need no predictions.
        from specserve.sources.prediction import num_predicted

        num_right = num_predicted(self.token_ids, answer)
        self.num_accepted += num_right
        self.num_rejected += max(len(self.token_ids) - num_right, 0)

    async def counted(
        self, outputs: AsyncGenerator[Any, None], *, is_cumulative: bool
    ) -> AsyncGenerator[Any, None]:
        """Passes outputs on; at their end, counts the prediction's tokens in each answer.

        Args:
            outputs: vLLM's ``RequestOutput`` objects of one request with any number of answers.
            is_cumulative: whether an output holds all tokens so far, or only the new ones.
        """
        self.num_running += 1
        answers: dict[int, list[int]] = {}
        async with aclosing(outputs):  # a disconnect closes only this generator
            async for output in outputs:
                for each in output.outputs:
                    answer = answers.setdefault(each.index, [])
                    if is_cumulative:
                        answer.clear()
                    answer.extend(each.token_ids)
                yield output
        for answer in answers.values():
            await asyncio.to_thread(self.count, answer)
        self.num_running -= 1


CURRENT_PREDICTION: ContextVar[Prediction | None] = ContextVar("specserve_prediction", default=None)
"""Prediction of the HTTP call being answered; None: the call has none."""


class Predictor:
    """Tokenizes predictions.

    Args:
        tokenizer: the model's tokenizer (transformers).
        max_tokens: longest prediction in tokens, the context length.

    Attributes:
        max_chars: a text with more characters certainly exceeds ``max_tokens``.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        Prediction(np.ones(1, np.int32)).count([1])  # compiles now, so that no answer waits
        # A copy in its own thread, because encoding changes state in the tokenizer's Rust part.
        encode = copy.deepcopy(tokenizer).encode
        self._encode = partial(encode, add_special_tokens=False)
        self._thread = ThreadPoolExecutor(1, "predictions")
        self.max_tokens = max_tokens
        self.max_chars = max_tokens * tokenizer.max_chars_per_token

    async def tokenize(self, text: str) -> list[int]:
        """A text's token ids, without begin and end tokens."""
        loop = asyncio.get_running_loop()
        return list(await loop.run_in_executor(self._thread, self._encode, text))


def report_counts() -> None:
    """Adds the counts of the current call's prediction to the ``usage`` that vLLM answers with.

    The chunks of a stream with ``continuous_usage_stats`` have no counts before the last.
    """
    # Imported here: vLLM takes seconds to import, and reading a prediction needs nothing of it.
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo, UsageInfo

    plain = UsageInfo.__init__

    def with_counts(self: UsageInfo, **fields: Any) -> None:
        plain(self, **fields)
        prediction = CURRENT_PREDICTION.get()
        if prediction is not None and not prediction.num_running:
            details = self.completion_tokens_details
            self.completion_tokens_details = CompletionTokenUsageInfo(
                reasoning_tokens=details.reasoning_tokens if details else 0,
                accepted_prediction_tokens=prediction.num_accepted,
                rejected_prediction_tokens=prediction.num_rejected,
            )

    UsageInfo.__init__ = with_counts
