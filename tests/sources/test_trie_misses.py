from __future__ import annotations

from specserve.core.metrics import SpeculationMetrics
from specserve.sources.trie_misses import TOLD_S, TrieMisses


class Line:
    """Misses, and what the metrics tell of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self._metrics = SpeculationMetrics(("trie",))
        self._misses = TrieMisses(self._metrics, lambda: self.now)

    def reason_after(self, namespace: str, reason: str = "") -> str:
        self._misses.note(namespace, reason)
        return self._metrics.snapshot().health[0].reason


def test_a_miss_is_told_until_a_request_of_its_namespace_finds_a_trie() -> None:
    line = Line()
    assert line.reason_after("n", "full") == "full"
    assert line.reason_after("other") == "full"
    assert line.reason_after("m", "fuller") == "fuller"
    assert line.reason_after("m") == "full"
    assert line.reason_after("n") == ""


def test_a_miss_of_long_ago_is_not_told() -> None:
    line = Line()
    line.reason_after("n", "full")
    line.now = TOLD_S
    assert line.reason_after("other") == ""
