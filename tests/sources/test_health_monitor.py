"""Reports of a monitor about the drafter that it looks for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import msgspec
import pytest

from specserve.core.errors import EngineError
from specserve.drafters.server import DrafterServer
from specserve.sources import health_monitor
from specserve.sources.health_monitor import Find, HealthMonitor, Wanted
from specserve.wire.endpoint import Endpoint
from tests.drafters.fakes import VOCAB_SIZE, WAIT_S, FakeDrafter
from tests.integration.cluster import eventually

Reports = Iterator[tuple[bool, str]]


@pytest.fixture
def watch() -> Iterator[Callable[[Find], Reports]]:
    """Starts a monitor and yields its reports."""
    with ExitStack() as stack:

        def watch(find: Find) -> Reports:
            reports: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()
            wanted = Wanted(kind="draft_model", vocab_size=500, tokenizer="", hidden_size=0)
            stack.enter_context(
                closing(HealthMonitor(wanted, find, lambda *each: reports.put(each)))
            )
            return iter(lambda: reports.get(timeout=WAIT_S), None)

        yield watch


Watch = Callable[[Find], Reports]


def test_a_failed_search_is_reported_and_repeated(watch: Watch) -> None:
    server = DrafterServer(FakeDrafter())
    answers = iter([EngineError("it did not start")])

    def find() -> str:
        if (error := next(answers, None)) is not None:
            raise error
        return server.address

    with closing(server):
        reports = watch(find)
        first_two = [next(reports), next(reports)]
        assert first_two == [(False, ""), (False, "it did not start")]
        assert next(refused for _, refused in reports if "vocab_size" in refused)


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "mismatch"),
    [
        ("another", VOCAB_SIZE, "tokenizer 'another' instead of 'own'"),
        ("own", 1, ""),
        ("", 1, f"vocab_size {VOCAB_SIZE} instead of 1"),
    ],
)
def test_a_drafter_needs_the_targets_vocabulary(
    tokenizer: str, vocab_size: int, mismatch: str
) -> None:
    wanted = Wanted(kind="draft_model", vocab_size=vocab_size, tokenizer="own", hidden_size=0)
    assert wanted.mismatch(FakeDrafter(0, tokenizer).card) == mismatch


def test_a_drafter_that_never_answers_is_reported(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_monitor, "SILENT_S", 0.05)
    with closing(DrafterServer(FakeDrafter())) as server:
        place = Endpoint.parse(server.address).place
        reports = watch(lambda: Endpoint(place, "wrong").url)
        up, refused = next(report for report in reports if report != (False, ""))
    assert not up
    assert refused == f"{place} does not answer; is the way to its port open?"


def test_a_silent_drafter_is_reported_before_find_returns(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_monitor, "SILENT_S", 0.3)
    drafter, is_closed, may_find = FakeDrafter(), threading.Event(), threading.Event()
    drafter.card = msgspec.structs.replace(drafter.card, vocab_size=500)
    server = DrafterServer(drafter)

    def find() -> str:
        if is_closed.is_set():
            may_find.wait(2 * WAIT_S)
        return server.address

    reports = watch(find)
    assert next(up for up, _ in reports if up)
    is_closed.set()
    server.close()
    assert not next(up for up, _ in reports if not up)
    may_find.set()


def test_a_drafter_with_a_new_secret_is_searched_for_again(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(DrafterServer(FakeDrafter())) as server:
        place, secret = Endpoint.parse(server.address).place, Endpoint.parse(server.address).secret
        urls = iter([Endpoint(place, "an earlier one's").url])
        reports = watch(lambda: next(urls, server.address))
        up, reason = next(report for report in reports if report != (False, ""))
    assert not up
    assert reason.endswith(f"at {place} has vocab_size {VOCAB_SIZE} instead of 500")
    assert server.counters.num_refused["unauthorized"] == 1
    assert not [record for record in caplog.records if record.exc_info]
    assert secret not in caplog.text


def test_a_drafter_that_was_found_later_is_taken(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_monitor, "SEARCH_S", 0.05)
    monkeypatch.setattr(health_monitor, "HELLO_UP_S", 0.05)
    drafters = [FakeDrafter(), FakeDrafter()]
    for drafter in drafters:
        drafter.card = msgspec.structs.replace(drafter.card, vocab_size=500)
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(DrafterServer(each))) for each in drafters)
        answers: list[str | EngineError | None] = [first.address, EngineError("away"), None]

        def find() -> str | None:
            answer = answers.pop(0) if answers else second.address
            if isinstance(answer, EngineError):
                raise answer
            return answer

        reports = watch(find)
        ups = [up for up, _ in (next(reports) for _ in range(60)) if not answers]
        assert ups.count(True) > ups.count(False)  # a search in vain loses no drafter
        eventually(lambda: second.idle_s < 0.5 < first.idle_s, "hellos to the second alone", WAIT_S)
