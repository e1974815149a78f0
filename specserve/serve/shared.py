"""Caches answers that many clients ask for, so that each is fetched at most once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

FRESH_S = 1.0
"""Lifetime of a cached answer, in seconds."""

AS_OF = "specserve-as-of"
"""Header with the time when the engine was asked for the answer's counts: Unix time in seconds."""

CACHEABLE = {"Cache-Control": f"max-age={FRESH_S:.0f}"}
"""Header of answers that are the same for all clients, so that proxies may cache them."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Shared(Generic[K, T]):
    """Caches the answer of ``fetch`` for each key, for ``fresh_s`` seconds.

    Each key has at most one fetch in flight. It may take ``timeout_s`` seconds, and goes on when a
    caller is cancelled. Errors are cached too, because a failed fetch costs as much as a successful
    one. All calls must come from one event loop.
    """

    def __init__(
        self, fetch: Callable[[K], Awaitable[T]], timeout_s: float, fresh_s: float = FRESH_S
    ) -> None:
        self._fetch = fetch
        self._timeout_s = timeout_s
        self._fresh_s = fresh_s
        self._answers: dict[K, asyncio.Task[T]] = {}

    async def get(self, key: K) -> T:
        """Returns the answer for ``key``.

        Raises:
            TimeoutError: the fetch took longer than ``timeout_s``.
            Exception: any error of the fetch.
        """
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = asyncio.create_task(self._fetch_in_time(key))
            answer.add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(answer)

    async def _fetch_in_time(self, key: K) -> T:
        async with asyncio.timeout(self._timeout_s):
            return await self._fetch(key)

    def _keep(self, key: K, done: asyncio.Task[T]) -> None:
        if not done.cancelled():
            done.exception()  # marks it as retrieved: all callers may have been cancelled
        asyncio.get_running_loop().call_later(self._fresh_s, self._answers.pop, key)
