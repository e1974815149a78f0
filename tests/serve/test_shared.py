from __future__ import annotations

import asyncio

import pytest

from specserve.serve.shared import Shared

MANY = 50


class Source:
    """Answers with the number of the fetch once ``may_answer`` is set."""

    def __init__(self) -> None:
        self.num_fetches = 0
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, key: str) -> str:
        self.num_fetches += 1
        answer = f"{key}{self.num_fetches}"
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return answer


def test_concurrent_callers_share_one_fetch() -> None:
    async def run() -> None:
        source = Source()
        shared = Shared(source, 5)
        asked = [asyncio.create_task(shared.get("a")) for _ in range(MANY)]
        await asyncio.sleep(0)
        source.may_answer.set()
        assert await asyncio.gather(*asked) == ["a1"] * MANY
        assert await shared.get("a") == "a1"
        assert source.num_fetches == 1

    asyncio.run(run())


def test_an_answer_is_kept_only_while_it_is_fresh() -> None:
    async def run() -> None:
        source = Source()
        source.may_answer.set()
        shared = Shared(source, 5, fresh_s=0.02)
        assert await shared.get("a") == "a1"
        assert await shared.get("b") == "b2"
        async with asyncio.timeout(5):
            while await shared.get("a") == "a1":
                await asyncio.sleep(0)
            while shared._answers:
                await asyncio.sleep(0)

    asyncio.run(run())


def test_a_cancelled_caller_does_not_cancel_the_others() -> None:
    async def run() -> None:
        source = Source()
        shared = Shared(source, 5)
        first, second = (asyncio.create_task(shared.get("a")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        source.may_answer.set()
        assert await second == "a1"

    asyncio.run(run())


def test_a_failed_fetch_raises_for_all_callers_and_the_next_one_answers() -> None:
    async def run(hangs: bool) -> None:
        source = Source()
        shared = Shared(source, 0.01, fresh_s=0)
        source.error = RuntimeError("the engine has died")
        if not hangs:
            source.may_answer.set()
        asked = [asyncio.create_task(shared.get("a")) for _ in range(MANY)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(each) for each in answers} == {TimeoutError if hangs else RuntimeError}
        assert source.num_fetches == 1
        source.error = None
        source.may_answer.set()
        await asyncio.sleep(0.001)
        assert await shared.get("a") == "a2"

    for hangs in (True, False):
        asyncio.run(run(hangs))


def test_an_error_is_kept_while_it_is_fresh() -> None:
    async def run() -> None:
        source = Source()
        source.may_answer.set()
        source.error = RuntimeError("the engine has died")
        shared = Shared(source, 5)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="the engine has died"):
                await shared.get("a")
        assert source.num_fetches == 1

    asyncio.run(run())
