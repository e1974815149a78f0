"""A chat with a model, line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from specserve.bench.token_file import TokenIds
from specserve.compare.tasks import Message
from specserve.core.errors import SpecServeError
from specserve.engine.generation import Completion, Job, Sampling
from specserve.generate.display import summary, write
from specserve.generate.questions import Model, encode

END, CLEAR = ("q", "quit", "exit"), ("clear", "new")


class Chat:
    """A dialogue of which the last turns are kept.

    Args:
        model: which answers.
        console: where lines are read and answers are shown.
        history_turns: earlier questions that are sent with a new one, and their answers.
        system: the system prompt; empty: none.
        sampling: gives that of an answer, for the tokens of its prompt.
    """

    def __init__(
        self,
        model: Model,
        console: Console,
        *,
        history_turns: int,
        system: str,
        sampling: Callable[[TokenIds], Sampling],
    ) -> None:
        self._model, self._console, self._sampling = model, console, sampling
        self._history_turns, self._system = history_turns, system
        self._turns: list[list[Message]] = []

    def run(self) -> list[dict[str, Any]]:
        """Asks for lines until one ends the chat, or the input does; what was said.

        Ctrl-C during an answer ends that answer; its text so far stays in the dialogue.
        """
        write(self._console, f"{', '.join(END)}: end; {', '.join(CLEAR)}: a new dialogue\n")
        said: list[dict[str, Any]] = []
        while True:
            try:
                question = self._console.input("\n[bold]You:[/] ").strip()
            except EOFError:
                write(self._console, "\n")
                return said
            if question.lower() in END:
                return said
            if question.lower() in CLEAR:
                self._turns.clear()
                write(self._console, "A new dialogue.\n")
            elif question:
                try:
                    said.append(self._answer(question))
                except SpecServeError as error:
                    write(self._console, f"error: {error}\n", "red")

    def _answer(self, question: str) -> dict[str, Any]:
        asked: Message = {"role": "user", "content": question}
        dialogue = [message for turn in self._turns for message in turn]
        prompt = encode(self._model, [*dialogue, asked], system=self._system)
        job = Job(prompt, self._sampling(prompt))
        text = ""

        def show(_: int, new: str, completion: Completion | None) -> None:
            nonlocal text
            text += new
            write(self._console, new)

        found: dict[str, Any] = {"question": question}
        try:
            (completion,) = self._model.run([job], 1, show)
            write(self._console, f"\n{summary([completion], completion.seconds)}\n", "dim")
            found |= asdict(completion)
        except KeyboardInterrupt:
            write(self._console, "\n(stopped)\n", "dim")
            found |= {"text": text, "finish_reason": "stopped"}
        self._turns.append([asked, {"role": "assistant", "content": text}])
        self._turns = self._turns[-self._history_turns :] if self._history_turns else []
        return found
