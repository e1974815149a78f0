"""What became of a prediction is known when the last output of a request has been dealt with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind

from specserve.engine.predicted import counted
from specserve.engine.prediction import Prediction
from specserve.sources.prediction import num_foretold

TEXT = list(range(10, 20))


def output(*answers: Sequence[int]) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(index=i, token_ids=each) for i, each in enumerate(answers)]
    )


async def taken(
    prediction: Prediction, outputs: list[Any], kind: RequestOutputKind, number: int = 99
) -> bool:
    """Takes so many outputs and leaves; whether what makes them was ended then."""
    is_ended = False

    async def generate() -> AsyncGenerator[Any, None]:
        nonlocal is_ended
        try:
            for each in outputs:
                yield each
        finally:
            is_ended = True

    answers = counted(generate(), prediction, kind)
    for _ in range(number):
        if await anext(answers, None) is None:
            break
    await answers.aclose()
    return is_ended


@pytest.mark.parametrize(
    ("kind", "outputs", "accepted", "rejected"),
    [
        (RequestOutputKind.FINAL_ONLY, [output(TEXT)], 10, 0),
        (RequestOutputKind.DELTA, [output(TEXT[:4]), output(TEXT[4:8])], 8, 2),
        (RequestOutputKind.CUMULATIVE, [output(TEXT[:4]), output(TEXT[:8])], 8, 2),
        (RequestOutputKind.FINAL_ONLY, [output(TEXT, [1, 2])], 10, 10),
        (RequestOutputKind.DELTA, [output(TEXT[:1], [1]), output(TEXT[1:3], [2])], 3, 17),
    ],
)
def test_the_tokens_of_all_answers_are_counted(
    kind: RequestOutputKind, outputs: list[Any], accepted: int, rejected: int
) -> None:
    prediction = Prediction(np.array(TEXT, np.int32), num_foretold)
    assert asyncio.run(taken(prediction, outputs, kind))
    assert (prediction.num_accepted, prediction.num_rejected) == (accepted, rejected)


def test_a_client_that_leaves_ends_the_request() -> None:
    prediction = Prediction(np.array(TEXT, np.int32), num_foretold)
    outputs = [output(TEXT[:1]), output(TEXT[1:2])]
    assert asyncio.run(taken(prediction, outputs, RequestOutputKind.DELTA, number=1))
