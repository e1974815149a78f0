"""Reads the predictions of calls, and counts what became of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import numpy as np
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from specserve.engine.prediction import Prediction, Predictor


async def counted(
    outputs: AsyncGenerator[RequestOutput, None], prediction: Prediction, kind: RequestOutputKind
) -> AsyncGenerator[RequestOutput, None]:
    """The same outputs; before the last one has been dealt with its prediction is counted.

    Args:
        outputs: of one request, of any number of answers.
        prediction: the call's.
        kind: whether an output holds all tokens so far, or what is new.
    """
    answers: dict[int, list[int]] = {}
    async with aclosing(outputs):  # a client that leaves closes this generator alone
        async for output in outputs:
            for each in output.outputs:
                answer = answers.setdefault(each.index, [])
                if kind is RequestOutputKind.CUMULATIVE:
                    answer.clear()
                answer.extend(each.token_ids)
            yield output
    for answer in answers.values():
        await asyncio.to_thread(prediction.count, answer)


def predictor(llm: AsyncLLM) -> Predictor:
    """How the replica of this engine reads predictions; compiles what counts them."""
    # Here, because numba takes seconds to import, and most applications take no predictions.
    from specserve.sources.prediction import num_foretold

    num_foretold(np.ones(1, np.int32), [1])
    # A copy in a thread of its own: Rust's part of a tokenizer is changed by what others encode.
    tokenizer: Any = copy.deepcopy(llm.get_tokenizer())
    thread = ThreadPoolExecutor(1, "predictions")

    async def tokenize(text: str) -> list[int]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread, encode, text)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    max_tokens = llm.model_config.max_model_len
    max_chars = max_tokens * tokenizer.max_chars_per_token
    return Predictor(tokenize, num_foretold, max_tokens, max_chars)
