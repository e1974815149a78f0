"""A chat with a model, line by line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from specserve.bench.token_file import TokenIds
from specserve.compare.tasks import Message, message
from specserve.core.errors import SpecServeError
from specserve.engine.generation import Completion, Job, Sampling
from specserve.generate.display import summary, write
from specserve.generate.questions import Model, encode

END, CLEAR = ("q", "quit", "exit"), ("clear", "new")


def chat(
    model: Model,
    console: Console,
    sampling: Callable[[TokenIds, str], Sampling],
    *,
    history_turns: int,
    system: str,
) -> list[dict[str, Any]]:
    """Runs a chat until the user or the input ends it; returns its questions and answers.

    Ctrl-C ends an answer; its text so far stays in the dialogue.

    Args:
        model: answers the questions.
        console: reads questions and shows answers.
        sampling: returns an answer's sampling, given its prompt and the prompt's name in errors.
        history_turns: number of earlier questions and answers to send with a new question.
        system: the system prompt; empty: none.
    """
    write(console, f"{', '.join(END)}: end; {', '.join(CLEAR)}: a new dialogue\n")
    turns: deque[list[Message]] = deque(maxlen=history_turns)
    said: list[dict[str, Any]] = []
    while True:
        try:
            question = console.input("\n[bold]You:[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            write(console, "\n")
            return said
        if question.lower() in END:
            return said
        if question.lower() in CLEAR:
            turns.clear()
            write(console, "A new dialogue.\n")
        elif question:
            asked = message("user", question)
            try:
                dialogue = [each for turn in turns for each in turn]
                prompt = encode(model, [*dialogue, asked], system=system)
                answer = _answer(model, console, Job(prompt, sampling(prompt, "the prompt")))
            except SpecServeError as error:
                write(console, f"error: {error}\n", "red")
            else:
                said.append({"question": question, **answer})
                turns.append([asked, message("assistant", answer["text"])])


def _answer(model: Model, console: Console, job: Job) -> dict[str, Any]:
    text = ""

    def show(_: int, new: str, completion: Completion | None) -> None:
        nonlocal text
        text += new
        write(console, new)

    try:
        (completion,) = model.run([job], 1, show=show).completions
    except KeyboardInterrupt:
        write(console, "\n(stopped)\n", "dim")
        return {"text": text, "finish_reason": "stopped"}
    write(console, f"\n{summary([completion], completion.seconds)}\n", "dim")
    return asdict(completion)
