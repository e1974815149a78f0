"""Continues token ids by a server's ``/v1/completions``, with OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from specserve.core.errors import ConfigError, SpecServeError, reason_of
from specserve.engine.generation import Completion, Job, RunResult, Sampling
from specserve.serve.shared import AS_OF

TIMEOUT_S = 600.0
WAIT_S = 10.0
"""How long counts may be awaited that are not older than the question; clocks may differ."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers.

    Attributes:
        url: without ``/v1``.
        model: the first of its models.
        max_model_len: that model's longest text in tokens.
    """

    url: str
    model: str
    max_model_len: int

    def sources(self) -> dict[str, dict[str, int]]:
        """Drafts, drafted and accepted tokens by source so far; empty where that is not told."""
        asked_at = time.time()
        while True:  # answers are kept for a second, by the replica and by its proxy
            answer = httpx.get(f"{self.url}/v1/speculation", headers=headers(), timeout=TIMEOUT_S)
            is_new = float(answer.headers.get(AS_OF, asked_at)) >= asked_at
            if is_new or time.time() - asked_at > WAIT_S:
                break
            time.sleep(0.1)
        counts = answer.json()["acceptance"] if answer.status_code == 200 else {}
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return {source: {name: each[name] for name in names} for source, each in counts.items()}

    def run(
        self, jobs: Sequence[Job], concurrency: int, progress: Callable[[int, int], None]
    ) -> RunResult:
        """Continues all jobs, at most ``concurrency`` at a time; ``drafts`` are not told.

        Raises:
            SpecServeError: a request failed; its line in the file is told.
        """
        return asyncio.run(self._run(jobs, concurrency, progress))

    async def _run(
        self, jobs: Sequence[Job], concurrency: int, progress: Callable[[int, int], None]
    ) -> RunResult:
        began = time.perf_counter()
        left = iter(enumerate(jobs))
        done: dict[int, Completion] = {}

        async def client(api: openai.AsyncOpenAI, left: Iterator[tuple[int, Job]]) -> None:
            for index, job in left:
                try:
                    done[index] = await self._complete(api, job)
                except (openai.OpenAIError, httpx.HTTPError) as error:
                    reason = reason_of(error)
                    raise SpecServeError(f"request {index + 1} failed: {reason}") from error
                progress(len(done), sum(len(each.token_ids) for each in done.values()))

        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=api_key(), timeout=TIMEOUT_S, max_retries=0
        ) as api:
            await asyncio.gather(*(client(api, left) for _ in range(min(concurrency, len(jobs)))))
        seconds = time.perf_counter() - began
        completions = tuple(done[index] for index in range(len(jobs)))
        return RunResult(completions=completions, seconds=seconds, drafts=())

    async def _complete(self, api: openai.AsyncOpenAI, job: Job) -> Completion:
        began = time.perf_counter()
        text, tokens, times, reason = "", list[int](), list[float](), ""
        async for chunk in await api.completions.create(
            model=self.model,
            prompt=list(job.prompt_token_ids),
            stream=True,
            **_options(job.sampling),
        ):
            elapsed = time.perf_counter() - began
            for choice in chunk.choices:
                new = (choice.model_extra or {}).get("token_ids") or []
                text += choice.text
                tokens += new
                times += [elapsed] * len(new)
                reason = choice.finish_reason or reason
        if not tokens:
            raise SpecServeError(f"{self.url} tells no token ids: it has to be vLLM's application")
        return Completion(
            text=text,
            token_ids=tuple(tokens),
            finish_reason=reason,
            seconds=time.perf_counter() - began,
            token_seconds=tuple(times),
        )


def find_server(url: str) -> Server:
    """Asks a server for its model.

    Raises:
        ConfigError: it does not answer, or is no vLLM's application.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers(), timeout=10.0)
        answer.raise_for_status()
        model = answer.json()["data"][0]
        return Server(url, model["id"], model["max_model_len"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        allowed = f"the address of a server ({reason_of(error)})"
        raise ConfigError("--url", url, allowed) from error


def _options(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "extra_body": {
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "return_token_ids": True,
        },
    }


def api_key() -> str:
    """As OpenAI's client finds it; any will do where the server asks for none."""
    return os.environ.get("OPENAI_API_KEY") or "none"


def headers() -> dict[str, str]:
    """Of a request to a server that may ask for a key."""
    return {"Authorization": f"Bearer {api_key()}"}
