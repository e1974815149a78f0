"""A model of a Serve file, in an engine that this command starts and ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from specserve.compare.arguments import only_application
from specserve.compare.engine_process import EngineProcess
from specserve.compare.prompts import configured_tokenizer
from specserve.core.errors import SpecServeError, reason_of
from specserve.engine.checkpoint import text_sizes
from specserve.engine.generation import Completion, Job, Show
from specserve.engine.methods import ALL, NONE, parse_method
from specserve.generate.base import Message, TokenIds


class LocalModel:
    """The only application's model; a :class:`specserve.generate.base.Model`.

    Args:
        config: the Serve file.
        chat_template: file of another template; None: the configured one.
        stack: at whose end the engine ends.

    Raises:
        ConfigError: the file is wrong, or what it names is not there.
    """

    def __init__(self, config: Path, chat_template: Path | None, stack: ExitStack) -> None:
        self._config = only_application(config)
        self.name = self._config.model.name
        self.max_model_len, self.vocab_size = text_sizes(self._config)
        self._stack = stack
        self._tokenizer = configured_tokenizer(self._config, str(chat_template or ""))

    def start(self) -> None:
        """See :class:`specserve.generate.base.Model`."""
        method = parse_method(ALL if self._config.speculation else NONE, self._config)
        self._engine = self._stack.enter_context(EngineProcess(self._config, method))
        with Console(stderr=True).status("loading the model"):
            self._engine.wait_ready()

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """See :class:`specserve.generate.base.Model`."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """See :class:`specserve.generate.base.Model`."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # Jinja runs the template
            raise SpecServeError(f"the chat template: {reason_of(error)}") from error
        return self.encode(text, add_special_tokens=False)  # the template has written them

    def run(self, jobs: Sequence[Job], concurrency: int, show: Show) -> Sequence[Completion]:
        """See :class:`specserve.generate.base.Model`."""
        return self._engine.run(jobs, concurrency, show=show).completions
