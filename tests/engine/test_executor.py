from __future__ import annotations

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from specserve.engine.executor import (
    DraftsWithTokens,
    InProcessExecutor,
    QueueWait,
    RayExecutor,
    attach_drafts,
)

DRAFTS = DraftTokenIds(["a"], [[1, 2]])
ASKED_FOR = DraftTokenIds(["a"], [[3]])


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> ModelRunnerOutput:
    """What the shards answer to the next step; asked for drafts they answer ``ASKED_FOR``."""
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    monkeypatch.setattr(MultiprocExecutor, "sample_tokens", lambda *_: output)
    monkeypatch.setattr(MultiprocExecutor, "take_draft_token_ids", lambda _: ASKED_FOR)
    return output


@pytest.fixture
def executor() -> DraftsWithTokens:
    return object.__new__(RayExecutor)  # without shards


@pytest.mark.parametrize("drafts", [DRAFTS, None])
def test_drafts_come_with_the_tokens(
    drafts: DraftTokenIds | None, output: ModelRunnerOutput, executor: DraftsWithTokens
) -> None:
    attach_drafts(output, drafts, {})
    assert executor.sample_tokens(None) is output
    assert executor.take_draft_token_ids() is drafts


def test_drafts_that_did_not_come_are_asked_for(
    output: ModelRunnerOutput, executor: DraftsWithTokens
) -> None:
    assert executor.take_draft_token_ids() is ASKED_FOR
    executor.sample_tokens(None)
    assert executor.take_draft_token_ids() is ASKED_FOR


def test_no_drafts_are_taken_twice(output: ModelRunnerOutput, executor: DraftsWithTokens) -> None:
    attach_drafts(output, DRAFTS, {})
    executor.sample_tokens(None)
    executor.take_draft_token_ids()
    assert executor.take_draft_token_ids() is ASKED_FOR


def test_a_call_that_the_shards_do_not_answer_in_time_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time_out(*_: object) -> None:
        raise TimeoutError

    failures: list[bool] = []
    executor = object.__new__(RayExecutor)  # without shards
    executor.is_failed = False
    executor.register_failure_callback(lambda: failures.append(executor.is_failed))
    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", time_out)
    with pytest.raises(TimeoutError):
        executor.collective_rpc("speculation_snapshot", 10)
    assert failures == [True]


def test_a_step_in_this_process_hands_its_tokens_over_before_the_next_one() -> None:
    assert not InProcessExecutor.supports_async_scheduling()


class Waits:
    """A thread that waits by a :class:`QueueWait`; time goes on only while it naps or computes."""

    def __init__(self) -> None:
        self.now = self.computed = 100.0
        self.naps: list[float] = []
        self._wait = QueueWait(lambda: self.now, lambda: self.computed, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds or 1e-5

    def until(self, seconds: float) -> None:
        """Waits for what is written after so many seconds."""
        self.naps.clear()
        end = self.now + seconds
        while self.now < end:
            self._wait()

    def work(self) -> None:
        self.now += 0.01
        self.computed += 0.01


def test_a_hand_over_within_a_step_is_polled_for() -> None:
    waits = Waits()
    for _ in range(3):
        waits.until(0.0005)
        assert set(waits.naps) == {0.0}
        waits.work()


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.9])
def test_a_longer_wait_sleeps_and_notices_its_end_soon(step_s: float) -> None:
    waits = Waits()
    waits.until(step_s)
    naps = [nap for nap in waits.naps if nap]
    assert sum(naps) > 0.85 * step_s
    assert max(naps) <= min(0.02 * step_s, 0.001)
    assert len(naps) < 1200


def test_a_thread_that_others_keep_from_running_does_not_begin_to_poll_anew() -> None:
    waits = Waits()
    waits.until(0.01)
    waits.now += 0.05  # in which others run
    waits.until(0.001)
    assert 0.0 not in waits.naps
