"""Questions and answers on the terminal, and what speculation did for them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from specserve.engine.generation import Completion, by_source


class Answers:
    """Shows answers in the order of their questions, however they come.

    The first answer that is not finished is shown as it comes, where ``streams``; those behind it
    are kept until it is their turn.

    Args:
        console: where they are shown.
        questions: as the user wrote them; one at least.
        streams: whether a text is shown before it is finished.
    """

    def __init__(self, console: Console, questions: Sequence[str], *, streams: bool) -> None:
        self._console, self._questions, self._streams = console, questions, streams
        self._kept = ["" for _ in questions]
        self._done: dict[int, Completion] = {}
        self._turn = 0
        self._ask()

    def show(self, index: int, text: str, completion: Completion | None) -> None:
        """Takes new text of an answer, and the whole with the last of it."""
        self._kept[index] += text
        if completion:
            self._done[index] = completion
        while self._turn < len(self._questions):
            completion = self._done.get(self._turn)
            if self._streams or completion:
                write(self._console, self._kept[self._turn])
                self._kept[self._turn] = ""
            if completion is None:
                return
            write(self._console, f"\n{summary([completion], completion.seconds)}\n\n", "dim")
            self._turn += 1
            if self._turn < len(self._questions):
                self._ask()

    def _ask(self) -> None:
        write(self._console, f"[{self._turn + 1}] ", "bold")
        write(self._console, f"{self._questions[self._turn]}\n")
        write(self._console, "answer: ", "bold")


def write(console: Console, text: str, style: str | None = None) -> None:
    """Prints a piece of text as it is, without markup and line breaks of its own, and at once."""
    console.out(text, end="", style=style, highlight=False)
    console.file.flush()


def summary(completions: Sequence[Completion], seconds: float) -> str:
    """Tokens, time, and tokens drafted and accepted by source, on one line."""
    num_tokens = sum(len(each.token_ids) for each in completions)
    rate = f", {num_tokens / seconds:.0f} tokens/s" if seconds else ""
    told = f"{num_tokens} tokens, {seconds:.2f} s{rate}"
    if len(completions) == 1:
        told += f", {completions[0].finish_reason}"
    for name, each in by_source(completions).items():
        if each["drafted_tokens"]:
            told += (
                f"; {name}: {each['drafted_tokens']} drafted, {each['accepted_tokens']} accepted"
            )
    return told
