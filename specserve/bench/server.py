"""A model behind a URL: completions of token ids, and vLLM's ``/tokenize``.

OpenAI's client takes five times as long for a chunk as this, which a server on the same CPUs feels.
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
"""For a connection, and for each piece of an answer; a whole answer may take longer."""
LONGEST_LINE = 1 << 24
"""Of a stream, in bytes; the first has the prompt's tokens."""


@dataclass(slots=True)
class Server:
    """A server that answers, with the first of its models.

    Attributes:
        url: without ``/v1``.
        name: of the model.
        max_model_len: longest text in tokens.
        vocab_size: 0, for it is not told; nor is ``num_devices``.
        chat_template: in Jinja; empty: the server's own.
        fields: of each request for a completion, beside its prompt and sampling; :meth:`start`
            sets them where they are empty.
    """

    url: str
    name: str
    max_model_len: int
    vocab_size: int = 0
    num_devices: int = 0
    chat_template: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def start(self, speculation: str = AUTO) -> None:
        """Asks for drafts by all sources, by none or by one of a kind, and for what they were.

        Raises:
            SpecServeError: it does not answer, or has no such source.
        """
        if self.fields:
            return
        controls: dict[str, Any] = {}
        if speculation != AUTO:
            controls["speculation"] = speculation
            if reason := self.refusal(0, **controls):
                raise SpecServeError(f"--speculation: {reason}")
        if not self.refusal(0, report=1):  # as by an application whose vLLM drafts by itself
            controls["report"] = 1
        self.fields = {"vllm_xargs": controls}

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """The text's tokens.

        Raises:
            SpecServeError: it does not answer.
        """
        return self._tokenize(prompt=text, add_special_tokens=add_special_tokens)

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """The tokens of a dialogue whose answer comes next.

        Raises:
            SpecServeError: it does not answer, or refuses the dialogue or the template.
        """
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        return self._tokenize(messages=list(messages), **template)

    def _tokenize(self, **question: Any) -> TokenIds:
        answer = self._post("/tokenize", question)
        try:
            return tuple(answer.json()["tokens"])
        except (ValueError, LookupError, TypeError) as error:
            told = _error_message(answer.content) or f"HTTP {answer.status_code} without tokens"
            raise SpecServeError(f"{answer.url}: {told}") from error

    def refusal(self, token: int, **controls: int | str) -> str:
        """Why the server takes no prompt of this token with these ``vllm_xargs``; empty: it does.

        Raises:
            SpecServeError: it does not answer.
        """
        body: dict[str, Any] = {"prompt": [token], "max_tokens": 1}
        if controls:  # a server whose vLLM drafts by itself takes none
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

        ``progress`` is called with the requests done and their tokens.

        Raises:
            SpecServeError: a request failed, or a stream has no token ids; its number is told.
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
        places = asyncio.Semaphore(concurrency)
        num_done = num_tokens = 0

        async def complete(index: int, job: Job) -> Completion:
            nonlocal num_done, num_tokens
            async with places:
                try:
                    done = await self._ask(session, job, partial(show, index))
                except (aiohttp.ClientError, OSError, ValueError, SpecServeError) as error:
                    told = f"request {index + 1} failed: {reason_of(error)}"
                    raise SpecServeError(told) from error
            show(index, "", done)
            num_done += 1
            num_tokens += len(done.token_ids)
            progress(num_done, num_tokens)
            return done

        async with aiohttp.ClientSession(
            headers=_headers(),
            timeout=aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=LONGEST_LINE,
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
            told = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
            sources = told.get("sources") or sources  # with the usage, in the last chunk
            for choice in chunk["choices"][:1]:  # of beams the best
                new = choice.get("token_ids") or []
                text += choice["text"]
                tokens += new
                times += [elapsed] * len(new)
                reason = choice.get("finish_reason") or reason
                show(choice["text"], None)
        if not tokens and not self.fields.get("use_beam_search"):  # whose best may be empty
            told = "tells no token ids: it has to be vLLM's application"
            raise SpecServeError(f"{self.url} {told}")
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
        """The chunks of an answer; one where it is not streamed.

        Raises:
            SpecServeError: the server's own error.
        """
        body = {
            "model": self.name,
            "prompt": list(job.prompt_token_ids),
            "stream": True,
            "stream_options": {"include_usage": True},  # with which comes what drafted
            **request_options(job.sampling),
            **self.fields,
        }
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            if not answer.ok:
                told = _error_message(await answer.read())
                raise SpecServeError(told or f"HTTP {answer.status}")
            if not body["stream"]:
                yield msgspec.json.decode(await answer.read())
                return
            async for line in answer.content:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    if told := _error_message(data):
                        raise SpecServeError(told)
                    yield msgspec.json.decode(data)


def find_server(url: str) -> Server:
    """Asks a server for its model.

    Raises:
        ConfigError: no address, or that of something else.
        SpecServeError: nothing answers there, or it is not ready, or refuses.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{url}/v1/models", headers=_headers(), timeout=10.0)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError) as error:
        raise ConfigError("--url", url, f"an address ({reason_of(error)})") from error
    except httpx.HTTPError as error:
        raise SpecServeError(f"no server answers at {url}: {reason_of(error)}") from error
    if not answer.is_success:
        told = _error_message(answer.content) or answer.reason_phrase
        if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            told += "; it is loading its model, or it is stopping"
        if answer.has_redirect_location:
            told += f" to {answer.headers['Location']}"
        raise SpecServeError(f"{url}/v1/models answers HTTP {answer.status_code}: {told}")
    try:
        model = answer.json()["data"][0]
        return Server(url, model["id"], model["max_model_len"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError("--url", url, f"a server of vLLM's ({reason_of(error)})") from error


def request_options(sampling: Sampling) -> dict[str, Any]:
    """What a completion is asked with, so that an offline engine would write the same.

    What is not said vLLM takes from the checkpoint's ``generation_config.json``, the penalties too.
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
    """What an error of OpenAI's form says, on one line; empty: the body is none."""
    if b'"error"' not in body:
        return ""
    try:
        return " ".join(str(msgspec.json.decode(body)["error"]["message"]).split())
    except (ValueError, LookupError, TypeError):
        return ""


def _headers() -> dict[str, str]:
    """Of a request to a server; its key, if it asks for one, is where OpenAI's client finds it."""
    return {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY') or 'none'}"}
