"""Shows questions, answers and their draft statistics on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from specserve.engine.generation import Completion, by_source


class Answers:
    """Shows concurrent answers in the order of their questions.

    Text of later answers is buffered until the earlier answers are finished.

    Args:
        console: shows the answers.
        questions: as the user wrote them; at least one.
        streams: show the first unfinished answer while it is generated.

    Attributes:
        done: the finished answers, by the index of their question.
    """

    def __init__(self, console: Console, questions: Sequence[str], *, streams: bool) -> None:
        self._console, self._questions, self._streams = console, questions, streams
        self._buffered = ["" for _ in questions]
        self.done: dict[int, Completion] = {}
        self._current = 0
        self._show_question()

    def show(self, index: int, text: str, completion: Completion | None) -> None:
        """Takes an answer's new text; ``completion`` comes with the last text."""
        self._buffered[index] += text
        if completion:
            self.done[index] = completion
        while self._current < len(self._questions):
            completion = self.done.get(self._current)
            if self._streams or completion:
                write(self._console, self._buffered[self._current])
                self._buffered[self._current] = ""
            if completion is None:
                return
            write(self._console, f"\n{summary([completion], completion.seconds)}\n\n", "dim")
            self._current += 1
            if self._current < len(self._questions):
                self._show_question()

    def _show_question(self) -> None:
        write(self._console, f"[{self._current + 1}] ", "bold")
        write(self._console, f"{self._questions[self._current]}\n")
        write(self._console, "answer: ", "bold")


def write(console: Console, text: str, style: str | None = None) -> None:
    """Prints a text unchanged, without markup or added line breaks, and flushes."""
    if style is None:
        console.file.write(text)  # rich replaces tabs and drops control characters
    else:
        console.out(text, end="", style=style, highlight=False)
    console.file.flush()


def summary(completions: Sequence[Completion], seconds: float) -> str:
    """One line with tokens, time, and drafted and accepted tokens by source."""
    num_tokens = sum(len(each.token_ids) for each in completions)
    rate = f", {num_tokens / seconds:.0f} tokens/s" if seconds else ""
    line = f"{num_tokens} tokens, {seconds:.2f} s{rate}"
    if len(completions) == 1:
        line += f", {completions[0].finish_reason}"
    for name, each in by_source(completions).items():
        if each["drafted_tokens"]:
            line += (
                f"; {name}: {each['drafted_tokens']} drafted, {each['accepted_tokens']} accepted"
            )
    return line
