from __future__ import annotations

import pytest
from ray.util.metrics import Counter

from specserve.drafters.counters import CounterExporter, ServerCounters


def test_what_was_counted_since_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, dict[str, str], float]] = []

    def inc(self: Counter, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        told.append((self.info["name"], dict(tags or {}), value))

    monkeypatch.setattr(Counter, "inc", inc)
    counters = ServerCounters()
    exporter = CounterExporter(counters, "mtp", "specserve-drafter-mtp-0")
    own = {"source": "mtp", "drafter": "specserve-drafter-mtp-0"}
    exporter.export()
    assert told == []
    counters.num_rows, counters.compute_s = 3, 0.5
    counters.num_refused["malformed"] = 2
    exporter.export()
    counters.num_rows += 4
    exporter.export()
    assert told == [
        ("specserve_drafter_rows_total", own, 3),
        ("specserve_drafter_compute_seconds_total", own, 0.5),
        ("specserve_drafter_refused_total", {**own, "reason": "malformed"}, 2),
        ("specserve_drafter_rows_total", own, 4),
    ]
