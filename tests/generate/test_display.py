from __future__ import annotations

import io

from rich.console import Console

from specserve.generate.display import Answers, summary
from tests.generate.model import completion


def answers(*, streams: bool) -> tuple[Answers, io.StringIO]:
    shown = io.StringIO()
    return Answers(Console(file=shown), ["first?", "second?"], streams=streams), shown


def test_only_the_first_open_answer_is_streamed() -> None:
    display, shown = answers(streams=True)
    display.show(1, "[b]2", None)
    display.show(0, "1", None)
    assert shown.getvalue() == "[1] first?\nanswer: 1"
    display.show(1, "", completion("[b]2"))
    assert "second?" not in shown.getvalue()
    display.show(0, "x", completion("1x"))
    assert "answer: 1x\n2 tokens, 0.50 s" in shown.getvalue()
    assert "[2] second?\nanswer: [b]2\n4 tokens" in shown.getvalue()


def test_without_streaming_an_answer_is_shown_when_complete() -> None:
    display, shown = answers(streams=False)
    display.show(0, "1", None)
    assert shown.getvalue() == "[1] first?\nanswer: "
    display.show(0, "x", completion("1x"))
    assert "answer: 1x\n" in shown.getvalue()


def test_control_characters_of_an_answer_are_written_unchanged() -> None:
    display, shown = answers(streams=True)
    display.show(0, "all:\n\tgcc\r\n", None)
    assert shown.getvalue().endswith("all:\n\tgcc\r\n")


def test_a_summary_adds_up_the_sources() -> None:
    found = summary([completion("ab", ngram=1), completion("c", ngram=2, trie_local=3)], 2.0)
    assert found == (
        "3 tokens, 2.00 s, 2 tokens/s; ngram: 6 drafted, 3 accepted; "
        "trie_local: 6 drafted, 3 accepted"
    )
