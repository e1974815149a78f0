"""A model of a Serve file, in an engine that the command starts and ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from specserve.bench.token_file import TokenIds
from specserve.compare.arguments import AUTO, OFF, only_application
from specserve.compare.engine_process import EngineProcess
from specserve.compare.prompts import Tokenizer, render
from specserve.compare.tasks import Message
from specserve.core.errors import MISSING, ConfigError
from specserve.engine.checkpoint import text_sizes
from specserve.engine.methods import ALL, NONE, parse_method


class LocalModel:
    """The model of a Serve file's only application.

    Args:
        file: the Serve file.
        stack: ends the engine when it closes.

    Attributes:
        tokenizer: the caller sets it before :meth:`encode` or :meth:`render`.
        run: :meth:`EngineProcess.run`, after :meth:`start`.

    Raises:
        ConfigError: the file is wrong, or its model is missing.
    """

    tokenizer: Tokenizer

    def __init__(self, file: Path, stack: ExitStack) -> None:
        self.config = only_application(file)
        self.name = self.config.model.name
        self.num_devices = self.config.engine.tensor_parallel_size
        self.max_model_len, self.vocab_size = text_sizes(self.config)
        self._stack = stack

    def start(self, speculation: str = AUTO) -> None:
        """Starts the engine with all sources (``auto``), none (``off``) or those of one kind.

        Raises:
            ConfigError: no source of this kind is configured.
            EngineError: the engine did not start.
        """
        kinds = [source.kind for source in self.config.speculation]
        if speculation not in (AUTO, OFF, *kinds):
            raise ConfigError("--speculation", speculation, ", ".join([AUTO, OFF, *kinds]))
        name = {AUTO: ALL if kinds else NONE, OFF: NONE}.get(speculation, speculation)
        method = parse_method(name, self.config)
        engine = self._stack.enter_context(EngineProcess(self.config, method))
        self.run = engine.run
        with Console(stderr=True).status("loading the model"):
            engine.wait_ready()

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """The text's tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """The prompt tokens of a dialogue, by the chat template.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the dialogue.
        """
        if not self.tokenizer.chat_template:
            raise ConfigError("--chat-template", MISSING, "one: the model has none")
        return render(self.tokenizer, messages).token_ids
