"""A model behind a URL: completions of token ids, and vLLM's ``/tokenize``.

OpenAI's client takes five times as long per chunk, which slows a server on the same CPUs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp
import httpx
import msgspec

from specserve.bench.token_file import TokenIds
from specserve.compare.arguments import AUTO
from specserve.compare.tasks import Message
from specserve.core.errors import ConfigError, SpecServeError, reason_of
from specserve.engine.generation import Completion, Job, RunResult, Sampling, Show

TIMEOUT_S = 600.0
"""Limit for a connection and for each read; a whole answer may take longer."""
MAX_LINE_CHARS = 1 << 24
"""Longest line of a stream, in bytes. The first line contains the prompt's token ids."""
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)  # the answer has another form


@dataclass(slots=True)
class Server:
    """A running server and the first of its models.

    Attributes:
        url: without ``/v1``.
        name: of the model.
        max_model_len: context length in tokens.
        vocab_size: 0: unknown, as is ``num_devices``, because the API does not return it.
        chat_template: in Jinja; empty: the server's own.
        fields: extra fields of each completion request; :meth:`start` sets them if they are empty.
    """

    url: str
    name: str
    max_model_len: int
    vocab_size: int = 0
    num_devices: int = 0
    chat_template: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def start(self, speculation: str = AUTO) -> None:
        """Sets ``fields`` to select the sources and to request draft statistics.

        Raises:
            SpecServeError: the server does not answer, or has no source of this kind.
        """
        if self.fields:
            return
        controls: dict[str, Any] = {}
        if speculation != AUTO:
            controls["speculation"] = speculation
            if reason := self.refusal(0, **controls):
                raise SpecServeError(f"--speculation: {reason}")
        if not self.refusal(0, report=1):  # refused by servers that draft by vLLM's own methods
            controls["report"] = 1
        self.fields = {"vllm_xargs": controls}

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """The text's tokens.

        Raises:
            SpecServeError: the server does not answer.
        """
        return self._tokenize(prompt=text, add_special_tokens=add_special_tokens)

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """The prompt tokens of a dialogue, by the chat template.

        Raises:
            SpecServeError: the server does not answer, or refuses the dialogue or the template.
        """
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        return self._tokenize(messages=list(messages), **template)

    def _tokenize(self, **question: Any) -> TokenIds:
        answer = self._post("/tokenize", question)
        try:
            return tuple(answer.json()["tokens"])
        except _UNREADABLE as error:
            reason = _error_message(answer.content) or f"HTTP {answer.status_code} without tokens"
            raise SpecServeError(f"{answer.url}: {reason}") from error

    def refusal(self, token: int, **controls: int | str) -> str:
        """Why the server refuses a one-token prompt with these ``vllm_xargs`` (HTTP 400); or empty.

        Raises:
            SpecServeError: the server does not answer.
        """
        body: dict[str, Any] = {"prompt": [token], "max_tokens": 1}
        if controls:  # a server that drafts by vLLM's own methods refuses even `learn`
            body["vllm_xargs"] = {"learn": 0, **controls}
        answer = self._post("/v1/completions", body)
        return _error_message(answer.content) if answer.status_code == 400 else ""

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        url, body = f"{self.url}{path}", {"model": self.name, **body}
        try:
            return httpx.post(url, json=body, headers=_headers(), timeout=TIMEOUT_S)
        except httpx.HTTPError as error:
            raise SpecServeError(f"{url}: {reason_of(error)}") from error

    def run(
        self,
        jobs: Sequence[Job],
        concurrency: int,
        progress: Callable[[int, int], None] = lambda num_done, num_tokens: None,
        show: Show = lambda index, text, completion: None,
    ) -> RunResult:
        """Continues all jobs, at most ``concurrency`` at a time.

        ``progress`` is called with the number of finished requests and of their tokens.

        Raises:
            SpecServeError: a request failed, or its stream has no token ids; has its number.
        """
        began = time.perf_counter()
        completions = asyncio.run(self._complete(jobs, concurrency, progress, show))
        seconds = time.perf_counter() - began
        return RunResult(completions=completions, seconds=seconds, drafts=())

    async def _complete(
        self,
        jobs: Sequence[Job],
        concurrency: int,
        progress: Callable[[int, int], None],
        show: Show,
    ) -> tuple[Completion, ...]:
        slots = asyncio.Semaphore(concurrency)
        num_done = num_tokens = 0

        async def complete(index: int, job: Job) -> Completion:
            nonlocal num_done, num_tokens
            async with slots:
                try:
                    done = await self._ask(session, job, partial(show, index))
                except (aiohttp.ClientError, OSError, SpecServeError, *_UNREADABLE) as error:
                    failure = f"request {index + 1} failed: {reason_of(error)}"
                    raise SpecServeError(failure) from error
            show(index, "", done)
            num_done += 1
            num_tokens += len(done.token_ids)
            progress(num_done, num_tokens)
            return done

        async with aiohttp.ClientSession(
            headers=_headers(),
            timeout=aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=MAX_LINE_CHARS,
            trust_env=True,
        ) as session:
            return tuple(await asyncio.gather(*map(complete, range(len(jobs)), jobs)))

    async def _ask(
        self, session: aiohttp.ClientSession, job: Job, show: Callable[[str, None], None]
    ) -> Completion:
        began = time.perf_counter()
        text, tokens, times, reason = "", list[int](), list[float](), ""
        sources: dict[str, dict[str, int]] = {}
        async for chunk in self._chunks(session, job):
            elapsed = time.perf_counter() - began
            report = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
            sources = report.get("sources") or sources  # the last chunk has them, with the usage
            for choice in chunk["choices"][:1]:  # of a beam search, the best beam
                new = choice.get("token_ids") or []
                text += choice["text"]
                tokens += new
                times += [elapsed] * len(new)
                reason = choice.get("finish_reason") or reason
                show(choice["text"], None)
        if not tokens and not self.fields.get("use_beam_search"):  # its best beam may be empty
            raise SpecServeError(f"{self.url} tells no token ids: it has to be vLLM's application")
        return Completion(
            text=text,
            token_ids=tuple(tokens),
            finish_reason=reason,
            seconds=time.perf_counter() - began,
            token_seconds=tuple(times),
            num_draft_tokens=sum(each["drafted_tokens"] for each in sources.values()),
            num_accepted_tokens=sum(each["accepted_tokens"] for each in sources.values()),
            sources=sources,
        )

    async def _chunks(
        self, session: aiohttp.ClientSession, job: Job
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of an answer; an answer that is not streamed is one chunk.

        Raises:
            SpecServeError: the server answered with an error.
        """
        body = {
            "model": self.name,
            "prompt": list(job.prompt_token_ids),
            "stream": True,
            "stream_options": {"include_usage": True},  # draft statistics come with the usage
            **request_options(job.sampling),
            **self.fields,
        }
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            if not answer.ok:
                reason = _error_message(await answer.read())
                raise SpecServeError(reason or f"HTTP {answer.status}")
            if not body["stream"]:
                yield msgspec.json.decode(await answer.read())
                return
            async for line in answer.content:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    if reason := _error_message(data):
                        raise SpecServeError(reason)
                    yield msgspec.json.decode(data)


def find_server(url: str) -> Server:
    """Connects to a server and reads its first model's name and context length.

    Raises:
        ConfigError: ``url`` is not an address, or not that of a vLLM server.
        SpecServeError: no server answers, or it answers with an error, such as while it loads.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{url}/v1/models", headers=_headers(), timeout=10.0)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError) as error:
        raise ConfigError("--url", url, f"an address ({reason_of(error)})") from error
    except httpx.HTTPError as error:
        raise SpecServeError(f"no server answers at {url}: {reason_of(error)}") from error
    if not answer.is_success:
        reason = _error_message(answer.content) or answer.reason_phrase
        if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            reason += "; it is loading its model, or it is stopping"
        if answer.has_redirect_location:
            reason += f" to {answer.headers['Location']}"
        raise SpecServeError(f"{url}/v1/models answers HTTP {answer.status_code}: {reason}")
    try:
        model = answer.json()["data"][0]
        return Server(url, model["id"], model["max_model_len"])
    except _UNREADABLE as error:
        raise ConfigError("--url", url, f"a server of vLLM's ({reason_of(error)})") from error


def request_options(sampling: Sampling) -> dict[str, Any]:
    """The sampling fields of a completion request; an offline engine would write the same text.

    They include the penalties, because vLLM takes missing fields from ``generation_config.json``.
    """
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "return_token_ids": True,
    }


def _error_message(body: bytes) -> str:
    """The message of an error in OpenAI's format, on one line; empty: the body is no error."""
    if b'"error"' not in body:
        return ""
    try:
        return " ".join(str(msgspec.json.decode(body)["error"]["message"]).split())
    except _UNREADABLE:
        return ""


def _headers() -> dict[str, str]:
    """The headers of a request, with the API key of ``OPENAI_API_KEY``."""
    return {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY') or 'none'}"}
