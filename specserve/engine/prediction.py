"""What a call predicts its answer to be: its tokens, and what became of them.

The HTTP side notes the prediction of the call being answered (:data:`CURRENT_PREDICTION`). vLLM's
handlers ask the engine's client for the answer in the same context: there its tokens are counted.
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


class Predictor:
    """How a replica reads predictions.

    Args:
        tokenizer: the model's, of transformers.
        max_tokens: of a prediction: the context length.

    Attributes:
        max_chars: no text of more characters has so few tokens.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        Prediction(np.ones(1, np.int32)).count([1])  # compiles what counts: no answer waits for it
        # A copy in a thread of its own: Rust's part of it is changed by what others encode.
        encode = copy.deepcopy(tokenizer).encode
        self._encode = partial(encode, add_special_tokens=False)
        self._thread = ThreadPoolExecutor(1, "predictions")
        self.max_tokens = max_tokens
        self.max_chars = max_tokens * tokenizer.max_chars_per_token

    async def tokenize(self, text: str) -> list[int]:
        """A text's token ids, without any that mark its beginning or end."""
        loop = asyncio.get_running_loop()
        return list(await loop.run_in_executor(self._thread, self._encode, text))


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
