"""What texts are continued by: a server, or an engine of this command's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specserve.engine.generation import Completion, Job, Show

TokenIds = tuple[int, ...]
Message = dict[str, str]


class Model(Protocol):
    """A model that answers; without a ``vocab_size`` its token ids are not known."""

    name: str
    max_model_len: int
    vocab_size: int

    def start(self) -> None:
        """Blocks until the model can answer.

        Raises:
            EngineError: it did not start.
        """
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """The text's tokens.

        Raises:
            SpecServeError: the server does not answer.
        """
        ...

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """The tokens of a dialogue whose answer comes next, by the chat template.

        Raises:
            SpecServeError: the template, or the server, refuses it.
        """
        ...

    def run(self, jobs: Sequence[Job], concurrency: int, show: Show) -> Sequence[Completion]:
        """Continues all jobs, at most ``concurrency`` at a time; in their order.

        Raises:
            SpecServeError: one failed.
            KeyboardInterrupt: Ctrl-C; nothing of the jobs runs on.
        """
        ...
