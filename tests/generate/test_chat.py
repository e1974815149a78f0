from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from specserve.engine.generation import Sampling
from specserve.generate import chat as chats
from tests.generate.model import Echo


def chat(
    monkeypatch: pytest.MonkeyPatch, model: Echo, lines: str, history_turns: int = 1
) -> tuple[list[dict[str, Any]], str]:
    """Runs a chat. Returns its answers and its output."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    shown = io.StringIO()
    found = chats.chat(
        model,
        Console(file=shown),
        lambda prompt, name: Sampling(max_tokens=5),
        history_turns=history_turns,
        system="be kind",
    )
    return found, shown.getvalue()


def test_the_last_turns_are_sent_with_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Echo()
    answers, shown = chat(monkeypatch, model, "one\ntwo\nthree\n")
    assert [each["text"] for each in answers] == ["one", "two", "three"]
    assert model.dialogues == [
        ["be kind", "one"],
        ["be kind", "one", "one", "two"],
        ["be kind", "two", "two", "three"],
    ]
    assert "three\n5 tokens, 0.50 s" in shown


def test_without_history_each_question_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Echo()
    chat(monkeypatch, model, "one\ntwo\n", history_turns=0)
    assert model.dialogues == [["be kind", "one"], ["be kind", "two"]]


@pytest.mark.parametrize("word", ["clear", "NEW"])
def test_clear_and_new_start_a_new_dialogue(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    model = Echo()
    chat(monkeypatch, model, f"one\n\n{word}\ntwo\n")
    assert model.dialogues == [["be kind", "one"], ["be kind", "two"]]


@pytest.mark.parametrize("word", ["q", "quit", "exit", " Exit "])
def test_quit_and_exit_end_the_chat(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    answers, _ = chat(monkeypatch, Echo(), f"one\n{word}\ntwo\n")
    assert len(answers) == 1


def test_ctrl_c_ends_only_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Echo(interrupted=True)
    answers, shown = chat(monkeypatch, model, "one\ntwo\n")
    assert [each["text"] for each in answers] == ["o", "t"]
    assert model.dialogues[1] == ["be kind", "one", "o", "two"]
    assert "(stopped)" in shown


def test_a_question_that_does_not_fit_is_reported_within_the_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from specserve.core.errors import ConfigError

    class Full(Echo):
        def render(self, messages: Any) -> Any:
            if messages[-1]["content"] == "one":
                raise ConfigError("prompt", "1 token", "less")
            return super().render(messages)

    answers, shown = chat(monkeypatch, Full(), "one\ntwo\n")
    assert [each["text"] for each in answers] == ["two"]
    assert "error: prompt: '1 token' is not allowed" in shown
