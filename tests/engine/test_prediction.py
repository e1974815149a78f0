"""The accepted and rejected tokens of a prediction are counted over all outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specserve.engine.prediction import Prediction

TEXT = list(range(10, 20))


def output(*answers: Sequence[int]) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(index=i, token_ids=each) for i, each in enumerate(answers)]
    )


async def taken(
    prediction: Prediction, outputs: list[Any], is_cumulative: bool, number: int = 99
) -> bool:
    """Takes ``number`` outputs and closes. Returns whether the generator was closed too."""
    is_ended = False

    async def generate() -> AsyncGenerator[Any, None]:
        nonlocal is_ended
        try:
            for each in outputs:
                yield each
        finally:
            is_ended = True

    answers = prediction.counted(generate(), is_cumulative=is_cumulative)
    for _ in range(number):
        if await anext(answers, None) is None:
            break
    await answers.aclose()
    return is_ended


@pytest.mark.parametrize(
    ("is_cumulative", "outputs", "accepted", "rejected"),
    [
        (False, [output(TEXT)], 10, 0),
        (False, [output(TEXT[:4]), output(TEXT[4:8])], 8, 2),
        (True, [output(TEXT[:4]), output(TEXT[:8])], 8, 2),
        (False, [output(TEXT, [1, 2])], 10, 10),
        (False, [output(TEXT[:1], [1]), output(TEXT[1:3], [2])], 3, 17),
    ],
)
def test_the_tokens_of_all_answers_are_counted(
    is_cumulative: bool, outputs: list[Any], accepted: int, rejected: int
) -> None:
    prediction = Prediction(np.array(TEXT, np.int32))
    assert asyncio.run(taken(prediction, outputs, is_cumulative))
    assert (prediction.num_accepted, prediction.num_rejected) == (accepted, rejected)


def test_a_client_that_leaves_ends_the_request() -> None:
    prediction = Prediction(np.array(TEXT, np.int32))
    outputs = [output(TEXT[:1]), output(TEXT[1:2])]
    assert asyncio.run(taken(prediction, outputs, False, number=1))
