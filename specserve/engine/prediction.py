"""What a call predicts its answer to be, on the HTTP side: its tokens, and what became of them.

The HTTP side notes the prediction of the call being answered (:data:`CURRENT_PREDICTION`). vLLM's
handlers ask the engine's client for the answer in the same context: there its tokens are counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from specserve.core.types import Int32Array


class Predictor(NamedTuple):
    """How a replica reads predictions.

    Attributes:
        tokenize: a text's token ids, without any that mark its beginning or end.
        num_foretold: how many tokens of an answer a prediction foretold.
        max_tokens: of a prediction: the context length.
        max_chars: no text of more characters has so few tokens.
    """

    tokenize: Callable[[str], Awaitable[list[int]]]
    num_foretold: Callable[[Int32Array, Sequence[int]], int]
    max_tokens: int
    max_chars: int


class Prediction:
    """The prediction of one call, which may have several answers.

    Args:
        token_ids: int32 ``[m]``.
        num_foretold: see :class:`Predictor`.

    Attributes:
        num_accepted: tokens of the answers that it foretold.
        num_rejected: its own tokens that stand in no place of an answer.
    """

    def __init__(
        self, token_ids: Int32Array, num_foretold: Callable[[Int32Array, Sequence[int]], int]
    ) -> None:
        self.token_ids = token_ids
        self._num_foretold = num_foretold
        self.num_accepted = self.num_rejected = 0

    def count(self, answer: Sequence[int]) -> None:
        """Counts what became of it in one answer, given as token ids."""
        num_foretold = self._num_foretold(self.token_ids, answer)
        self.num_accepted += num_foretold
        self.num_rejected += max(len(self.token_ids) - num_foretold, 0)


CURRENT_PREDICTION: ContextVar[Prediction | None] = ContextVar("specserve_prediction", default=None)
"""Prediction of the HTTP call being answered; None: it has none."""
