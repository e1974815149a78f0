"""Clients that stream completions from a server. Each sends one request after the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import aiohttp

from specserve.core.errors import SpecServeError
from tests.peers.workload import Request

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """Output tokens of a request, seconds to the first one, and from there to the last one."""

    num_tokens: int
    first_s: float
    rest_s: float


def drive(url: str, model: str, requests: Sequence[Request], num_clients: int) -> dict[str, float]:
    """Sends all requests, ``num_clients`` at a time.

    Returns:
        ``tokens_per_second`` of all requests together, ``output_tokens`` and ``seconds``. Medians
        over the requests: ``first_token_ms``, and ``token_ms``, the time between two tokens.

    Raises:
        SpecServeError: a request failed.
    """
    began = time.perf_counter()
    answers = asyncio.run(_drive(f"{url}/v1/completions", model, requests, num_clients))
    seconds = time.perf_counter() - began
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "tokens_per_second": num_tokens / seconds,
        "first_token_ms": 1e3 * median(answer.first_s for answer in answers),
        "token_ms": 1e3 * median(a.rest_s / max(a.num_tokens - 1, 1) for a in answers),
        "output_tokens": num_tokens,
        "seconds": seconds,
    }


async def _drive(
    url: str, model: str, requests: Sequence[Request], num_clients: int
) -> list[_Answer]:
    left, answers = iter(requests), list[_Answer]()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
        clients = [_client(session, url, model, left, answers) for _ in range(num_clients)]
        await asyncio.gather(*clients)
    return answers


async def _client(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    left: Iterator[Request],
    answers: list[_Answer],
) -> None:
    for request in left:
        answers.append(await _ask(session, url, request.body(model)))


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> _Answer:
    began = time.perf_counter()
    first = last = 0.0
    pieces: list[bytes] = []
    async with session.post(url, json=body) as response:
        async for piece in response.content.iter_any():
            last = time.perf_counter()
            first = first or last
            pieces.append(piece)
    # Parsed only at the end, because the clients share the cores with the servers.
    lines = [line for line in b"".join(pieces).splitlines() if line]
    if response.status != 200 or len(lines) < 2 or lines[-1] != b"data: [DONE]":
        raise SpecServeError(f"a request failed with {response.status}: {lines[-1:]!r}")
    usage = json.loads(lines[-2].removeprefix(b"data: "))["usage"]
    return _Answer(usage["completion_tokens"], first - began, last - first)
