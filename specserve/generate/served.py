"""A model behind a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specserve.bench.server_run import find_server
from specserve.engine.chat_template import read_chat_template
from specserve.engine.generation import Completion, Job, Show
from specserve.generate.base import Message, TokenIds


class ServedModel:
    """A server's first model; a :class:`specserve.generate.base.Model`.

    Args:
        url: of the server, with or without ``/v1``; its key is in ``OPENAI_API_KEY``.
        chat_template: file of another template than the server's; None: the server's.
        beams: fields of a request that ask for a beam search; empty: none is.

    Raises:
        SpecServeError: nothing answers there, or the template is none.
    """

    vocab_size = 0

    def __init__(self, url: str, chat_template: Path | None, beams: Mapping[str, Any]) -> None:
        self._more, self._template = beams, {}
        if chat_template:
            text = read_chat_template(str(chat_template), "--chat-template")
            self._template["chat_template"] = text
        self._server = find_server(url)
        self.name, self.max_model_len = self._server.model, self._server.max_model_len

    def start(self) -> None:
        """See :class:`specserve.generate.base.Model`; it answers already."""
        self._more = self._more or {"vllm_xargs": self._server.report()}

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """See :class:`specserve.generate.base.Model`."""
        return self._server.tokenize(prompt=text, add_special_tokens=add_special_tokens)

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """See :class:`specserve.generate.base.Model`."""
        return self._server.tokenize(messages=list(messages), **self._template)

    def run(self, jobs: Sequence[Job], concurrency: int, show: Show) -> Sequence[Completion]:
        """See :class:`specserve.generate.base.Model`."""
        return asyncio.run(self._server.complete(jobs, concurrency, show, self._more, "prompt {}"))
