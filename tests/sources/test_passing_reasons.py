from __future__ import annotations

import pytest

from specserve.core.metrics import SpeculationMetrics
from specserve.sources.passing_reasons import SHOWN_S, PassingReasons


class Reasons:
    """Notes reasons, and returns the one that is shown."""

    def __init__(self) -> None:
        self.now = 0.0
        self._metrics = SpeculationMetrics(("trie",))
        self._reasons = PassingReasons(self._metrics, "trie", lambda: self.now)

    def shown_after(self, key: str, reason: str = "", error: Exception | None = None) -> str:
        self._reasons.note(key, reason, error)
        return self._metrics.snapshot().health[0].reason


def test_a_reason_is_shown_until_a_request_of_its_key_gets_drafts() -> None:
    reasons = Reasons()
    assert reasons.shown_after("n", "full") == "full"
    assert reasons.shown_after("other") == "full"
    assert reasons.shown_after("m", "fuller") == "fuller"
    assert reasons.shown_after("m") == "full"
    assert reasons.shown_after("n") == ""


def test_an_old_reason_is_not_shown() -> None:
    reasons = Reasons()
    reasons.shown_after("n", "full")
    reasons.now = SHOWN_S
    assert reasons.shown_after("other") == ""


def test_a_reason_that_comes_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reasons = Reasons()
    for _ in range(3):
        reasons.shown_after("n", "failed", RuntimeError("no"))
    assert [(each.getMessage(), bool(each.exc_info)) for each in caplog.records] == [
        ("No drafts from the trie: failed", True)
    ]
