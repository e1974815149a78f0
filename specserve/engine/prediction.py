"""What a call predicts its answer to be: its tokens, and what became of them.

The HTTP side notes the prediction of the call being answered (:data:`CURRENT_PREDICTION`). vLLM's
handlers ask the engine's client for the answer in the same context: there its tokens are counted.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specserve.core.types import Int32Array


@dataclass(slots=True)
class Prediction:
    """The prediction of one call, which may have several answers.

    Attributes:
        token_ids: int32 ``[m]``.
        num_accepted: tokens of the answers that it foretold.
        num_rejected: its own tokens that stand in no place of an answer.
    """

    token_ids: Int32Array
    num_accepted: int = 0
    num_rejected: int = 0

    def count(self, answer: Sequence[int]) -> None:
        """Counts what became of it in one answer, given as token ids."""
        # Here, because numba takes seconds to import, and most applications take no predictions.
        from specserve.sources.prediction import num_foretold

        foretold = num_foretold(self.token_ids, answer)
        self.num_accepted += foretold
        self.num_rejected += max(len(self.token_ids) - foretold, 0)


CURRENT_PREDICTION: ContextVar[Prediction | None] = ContextVar("specserve_prediction", default=None)
"""Prediction of the HTTP call being answered; None: it has none."""


class Predictor(NamedTuple):
    """How a replica reads predictions.

    Attributes:
        tokenize: a text's token ids, without any that mark its beginning or end.
        max_tokens: of a prediction: the context length.
        max_chars: no text of more characters has so few tokens.
    """

    tokenize: Callable[[str], Awaitable[list[int]]]
    max_tokens: int
    max_chars: int


def predictor(llm: Any) -> Predictor:
    """How the replica of vLLM's ``AsyncLLM`` reads predictions; compiles what counts them."""
    Prediction(np.ones(1, np.int32)).count([1])
    # A copy in a thread of its own: Rust's part of a tokenizer is changed by what others encode.
    tokenizer: Any = copy.deepcopy(llm.get_tokenizer())
    thread = ThreadPoolExecutor(1, "predictions")

    async def tokenize(text: str) -> list[int]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread, encode, text)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    max_tokens = llm.model_config.max_model_len
    return Predictor(tokenize, max_tokens, max_tokens * tokenizer.max_chars_per_token)


async def counted(
    outputs: AsyncGenerator[Any, None], prediction: Prediction, *, is_cumulative: bool
) -> AsyncGenerator[Any, None]:
    """The same outputs; before the last one has been dealt with its prediction is counted.

    Args:
        outputs: vLLM's ``RequestOutput``s of one request, of any number of answers.
        prediction: the call's.
        is_cumulative: whether an output holds all tokens so far, or what is new.
    """
    answers: dict[int, list[int]] = {}
    async with aclosing(outputs):  # a client that leaves closes this generator alone
        async for output in outputs:
            for each in output.outputs:
                answer = answers.setdefault(each.index, [])
                if is_cumulative:
                    answer.clear()
                answer.extend(each.token_ids)
            yield output
    for answer in answers.values():
        await asyncio.to_thread(prediction.count, answer)
