"""Answers that many may ask for, and that are fetched once a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

FRESH_S = 1.0
"""How long an answer is given to all who ask for it."""

AS_OF = "specserve-as-of"
"""Header that tells when the engine was asked for what the answer says: Unix time in seconds."""

CACHEABLE = {"Cache-Control": f"max-age={FRESH_S:.0f}"}
"""Header of answers that are the same for all who ask. Proxies may give them to others as well."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Shared(Generic[K, T]):
    """Fetches what is asked for; all who ask within a second get the same answer.

    Of each key at most one fetch is in flight. It goes on when who asked for it is cancelled. An
    error is an answer, too: a fetch that fails costs as much as one that does not. What is kept is
    what was asked for in the last second. Calls come from one event loop. A fetch may take
    ``timeout_s`` seconds, and an answer is given for ``fresh_s``.
    """

    def __init__(
        self, fetch: Callable[[K], Awaitable[T]], timeout_s: float, fresh_s: float = FRESH_S
    ) -> None:
        self._fetch = fetch
        self._timeout_s = timeout_s
        self._fresh_s = fresh_s
        self._answers: dict[K, asyncio.Task[T]] = {}

    async def get(self, key: K) -> T:
        """The answer for ``key``.

        Raises:
            TimeoutError: the fetch took too long.
            Exception: what the fetch has raised.
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
            done.exception()  # nobody may be left to retrieve it
        asyncio.get_running_loop().call_later(self._fresh_s, self._answers.pop, key)
