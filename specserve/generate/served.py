"""A model behind a URL, asked for completions by OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import openai

from specserve.bench.server_run import (
    TIMEOUT_S,
    api_key,
    error_message,
    find_server,
    headers,
    reported_sources,
    request_options,
)
from specserve.core.errors import SpecServeError, reason_of
from specserve.engine.chat_template import read_chat_template
from specserve.engine.generation import Completion, Job, Show
from specserve.generate.base import Beams, Message, TokenIds


class ServedModel:
    """A server's first model; a :class:`specserve.generate.base.Model`.

    Args:
        url: of the server, with or without ``/v1``; its key is in ``OPENAI_API_KEY``.
        chat_template: file of another template than the server's; None: the server's.

    Raises:
        SpecServeError: nothing answers there, or the template is none.
    """

    vocab_size = 0

    def __init__(self, url: str, chat_template: Path | None = None) -> None:
        self._template = {}
        if chat_template:
            text = read_chat_template(str(chat_template), "--chat-template")
            self._template["chat_template"] = text
        server = find_server(url)
        self._url, self.name, self.max_model_len = server.url, server.model, server.max_model_len
        self._asks_reports = True

    def start(self) -> None:
        """See :class:`specserve.generate.base.Model`; it answers already."""

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """See :class:`specserve.generate.base.Model`."""
        return self._tokenize(prompt=text, add_special_tokens=add_special_tokens)

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """See :class:`specserve.generate.base.Model`."""
        return self._tokenize(messages=list(messages), **self._template)

    def run(
        self, jobs: Sequence[Job], concurrency: int, show: Show, beams: Beams | None = None
    ) -> list[Completion]:
        """See :class:`specserve.generate.base.Model`."""
        return asyncio.run(self._run(jobs, concurrency, show, beams))

    def _tokenize(self, **question: Any) -> TokenIds:
        body = {"model": self.name, **question}
        try:
            answer = httpx.post(
                f"{self._url}/tokenize", json=body, headers=headers(), timeout=TIMEOUT_S
            )
            if answer.is_error:
                told = error_message(answer.content) or f"HTTP {answer.status_code}"
                raise SpecServeError(f"{self._url}/tokenize: {told}")
            return tuple(answer.json()["tokens"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise SpecServeError(f"{self._url}/tokenize: {reason_of(error)}") from error

    async def _run(
        self, jobs: Sequence[Job], concurrency: int, show: Show, beams: Beams | None
    ) -> list[Completion]:
        done: dict[int, Completion] = {}
        left = iter(enumerate(jobs))

        async def client(api: openai.AsyncOpenAI) -> None:
            for index, job in left:
                try:
                    done[index] = await self._ask(api, job, beams, partial(show, index))
                except (openai.OpenAIError, httpx.HTTPError) as error:
                    raise SpecServeError(f"prompt {index + 1}: {reason_of(error)}") from error
                show(index, "", done[index])

        async with openai.AsyncOpenAI(
            base_url=f"{self._url}/v1", api_key=api_key(), timeout=TIMEOUT_S, max_retries=0
        ) as api:
            await asyncio.gather(*(client(api) for _ in range(min(concurrency, len(jobs)))))
        return [done[index] for index in range(len(jobs))]

    async def _ask(
        self,
        api: openai.AsyncOpenAI,
        job: Job,
        beams: Beams | None,
        show: Callable[[str, None], None],
    ) -> Completion:
        began = perf_counter()
        asks_report = self._asks_reports
        body = _body(job, beams, asks_report=asks_report)
        text, tokens, times, reason = "", list[int](), list[float](), ""
        sources: dict[str, dict[str, int]] = {}
        try:
            answer = await api.completions.create(model=self.name, **body)
        except openai.BadRequestError as error:
            if not asks_report or "vllm_xargs.report" not in str(error):
                raise
            self._asks_reports = False  # vLLM drafts there by itself, and tells nothing
            return await self._ask(api, job, beams, show)
        async for chunk in answer if body["stream"] else _once(answer):
            sources = reported_sources(chunk.model_extra or {}) or sources
            for choice in chunk.choices[:1]:  # of beams the best
                new = (choice.model_extra or {}).get("token_ids") or []
                text += choice.text
                tokens += new
                times += [perf_counter() - began] * len(new)
                reason = choice.finish_reason or reason
                show(choice.text, None)
        return Completion(
            text=text,
            token_ids=tuple(tokens),
            finish_reason=reason,
            seconds=perf_counter() - began,
            token_seconds=tuple(times),
            num_draft_tokens=sum(each["drafted_tokens"] for each in sources.values()),
            num_accepted_tokens=sum(each["accepted_tokens"] for each in sources.values()),
            sources=sources,
        )


async def _once(answer: Any) -> AsyncIterator[Any]:
    yield answer


def _body(job: Job, beams: Beams | None, *, asks_report: bool) -> dict[str, Any]:
    sampling = job.sampling
    extra: dict[str, Any] = {
        **request_options(sampling),
        "stop_token_ids": list(sampling.stop_token_ids),
        "vllm_xargs": {"report": 1} if asks_report else {},
    }
    body: dict[str, Any] = {
        "prompt": list(job.prompt_token_ids),
        "stream": beams is None,
        "extra_body": extra,
    }
    if beams is None:
        return body | {"stream_options": {"include_usage": True}}
    extra |= {"use_beam_search": True, "length_penalty": beams.length_penalty}
    extra["vllm_xargs"] = {"beam_sample": 1} if beams.samples else {}
    return body | {"n": beams.num_beams}
