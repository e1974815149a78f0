"""A drafter's server: computes the drafts of all waiting requests in one batch.

One thread reads, computes and answers. A request is read between two model calls, and its time
budget starts when it is read.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from secrets import token_hex

import numpy as np

from specserve.core.errors import EngineError, WireError, shorten
from specserve.drafters.base import Answer, Drafter, Row
from specserve.drafters.counters import ServerCounters
from specserve.drafters.router import Arrival, Router
from specserve.drafters.schedule import Call, Schedule, Task
from specserve.wire.messages import (
    DraftAnswer,
    DraftRequest,
    Greeting,
    Hello,
    Reason,
    Refusal,
    RowAnswer,
    TextRow,
)

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Longest wait for a message in seconds; an idle server notices within this time that it closes."""

MAX_TURN_S = 300
"""Limit of one turn in seconds. A process that hangs longer ends; its parent or Ray restarts it. No
forward pass takes that long. Time in which the process is suspended counts too."""

_ARM_S = 1.0
"""Shortest interval between two starts of that time-out, in seconds."""

REPLICA_SILENT_S = 10.0
"""Seconds without a hello after which a replica loses its seat."""

MAX_FAILURES = 8
"""Batches in a row that may fail entirely before ``on_broken``: some GPU errors are permanent."""

MAX_WAITING = 256
"""Most waiting requests of one client, which sends one for its drafts and one per long text."""

MAX_WAITING_BYTES = 256 << 20
"""Most bytes that the waiting requests of one client may take."""


class DrafterServer:
    """Answers replicas' requests with one drafter.

    All texts that want a draft are computed first, in one batch. Long texts are computed between
    drafts, a piece at a time. A client's errors are counted and do not affect other clients.

    Args:
        drafter: called only from this server's thread.
        bind: ZeroMQ address, port 0 for any free one.
        on_broken: called after ``MAX_FAILURES`` batches in a row have failed entirely.

    Attributes:
        address: where clients connect, with this server's secret.
        counters: totals since the start.
    """

    def __init__(
        self,
        drafter: Drafter,
        bind: str = "tcp://127.0.0.1:0",
        on_broken: Callable[[], object] = lambda: None,
    ) -> None:
        self.counters = ServerCounters()
        self._drafter = drafter
        self._on_broken, self._num_failures = on_broken, 0
        self._card = drafter.card
        self._instance = token_hex(8)
        self._router = Router(bind, self._note_malformed, self._note_refused)
        self.address = self._router.address
        self._seats: dict[str, float] = {}
        self._arrivals: deque[Arrival] = deque()
        self._schedule = Schedule()
        self._calls: list[Call] = []
        self._logged: set[str] = set()
        self._active_at = time.monotonic()
        self._call_began: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._compute, name="drafter-model", daemon=True)
        self._thread.start()

    @property
    def idle_s(self) -> float:
        """Seconds since the last message, seat request or model call; 0 during a call."""
        return 0.0 if self._call_began is not None else time.monotonic() - self._active_at

    def seat(self, replica: str) -> int:
        """Assigns or keeps the replica's seat; returns how many replicas took theirs earlier.

        May be called from any thread.

        Raises:
            EngineError: a model call hangs; the replica then asks another drafter.
        """
        now = self._active_at = time.monotonic()
        if (began := self._call_began) is not None and now - began > REPLICA_SILENT_S:
            raise EngineError(f"its model call has not ended for {now - began:.0f} s")
        for name, heard_at in list(self._seats.items()):
            if heard_at <= now - REPLICA_SILENT_S:
                self.leave(name)
        self._seats[replica] = now
        return list(self._seats).index(replica)

    def leave(self, replica: str) -> None:
        """Frees a replica's seat; may be called from any thread."""
        self._seats.pop(replica, None)

    def close(self) -> None:
        """Stops the thread after the turn in progress; requests that wait are dropped."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()

    def _compute(self) -> None:
        armed_at = 0.0
        while not self._closing.is_set():
            if time.monotonic() - armed_at > _ARM_S:
                armed_at = time.monotonic()
                # File descriptor 2: sys.stderr may be replaced by an object without one.
                faulthandler.dump_traceback_later(MAX_TURN_S, exit=True, file=2)
            try:
                self._take_turn()
            except Exception as error:  # nothing that a client causes may end the thread
                self._log_once(type(error).__name__, str(error), error)
                self._drop(list(self._calls), "failed")
        faulthandler.cancel_dump_traceback_later()
        self._router.close()

    def _take_turn(self) -> None:
        self._take_arrivals()
        now = time.monotonic()
        self._drop([call for call in self._calls if call.expires_at < now], "expired")
        self._run(self._schedule.drafts())
        self._answer_done()
        self._run(self._schedule.feed())
        self._answer_done()

    def _take_arrivals(self) -> None:
        """Handles the messages that have arrived; waits for one only if there is no work."""
        is_busy = bool(self._schedule or self._arrivals)
        self._arrivals.extend(self._router.get(0.0 if is_busy else POLL_S))
        while self._arrivals:
            self._take(self._arrivals.popleft())

    def _take(self, arrival: Arrival) -> None:
        name, question = arrival.client, arrival.question
        self._active_at = arrival.at
        if isinstance(question, Hello):
            if question.replica in self._seats:
                self._seats[question.replica] = arrival.at
            self._router.reply(name, Greeting(question.number, self._instance, self._card))
        else:
            self.counters.num_rows += len(question.rows)
            self._forget(name, question.forget)
            waiting = [call.num_bytes for call in self._calls if call.client == name]
            num_bytes = sum(waiting) + arrival.num_bytes
            if len(waiting) < MAX_WAITING and num_bytes <= MAX_WAITING_BYTES:
                self._open(arrival, question)
            else:
                self._refuse(name, question.number, "crowded")

    def _unfit(self, rows: Sequence[TextRow]) -> set[int]:
        """Indices of rows with a token id beyond the vocabulary, or states of a wrong width."""
        width, vocab_size = self._card.hidden_size, self._card.vocab_size
        unfit = {
            index
            for index, row in enumerate(rows)
            if row.states is not None and row.states.shape[1] != width
        }
        if rows and np.concatenate([row.tokens for row in rows]).max(initial=0) >= vocab_size:
            unfit |= {
                index for index, row in enumerate(rows) if row.tokens.max(initial=0) >= vocab_size
            }
        return unfit

    def _open(self, arrival: Arrival, request: DraftRequest) -> None:
        call = Call(
            arrival.client,
            request.number,
            arrival.at + request.budget_s,
            arrival.num_bytes,
            [None] * len(request.rows),
        )
        self._calls.append(call)
        unfit = self._unfit(request.rows)
        self.counters.num_refused["unfit"] += len(unfit)
        for index, row in enumerate(request.rows):
            if index in unfit:
                call.answers[index] = Answer(row.start, problem="unfit")
            else:
                self._schedule.add(Task(call, index, _row(arrival.client, row)))

    def _run(self, tasks: list[Task]) -> None:
        """Computes these tasks' next pieces; calls ``on_broken`` after repeated failures."""
        if not tasks:
            return
        if self._has_run(tasks):
            self._num_failures = 0
            return
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            self._on_broken()

    def _has_run(self, tasks: list[Task]) -> bool:
        """Computes these tasks' next pieces; returns whether any succeeded.

        If the model raises, each half is tried alone: the batch may be too large for the memory,
        or one task may be the cause.
        """
        calls = {task.call for task in tasks}
        began = self._call_began = time.monotonic()
        answers: list[Answer] | None = None
        try:
            answers = self._drafter.draft([task.piece() for task in tasks])
        except Exception as error:
            self._log_once(type(error).__name__, str(error), error)
        finally:
            self._active_at, self._call_began = time.monotonic(), None
        if answers is None:  # outside the handler: the error keeps the model's tensors alive
            if len(tasks) == 1 or all(call.expires_at < self._active_at for call in calls):
                for task in tasks:
                    self._schedule.fail(task)
                self.counters.num_refused["failed"] += len(tasks)
                return False
            middle = len(tasks) // 2
            have_run = [self._has_run(half) for half in (tasks[:middle], tasks[middle:])]
            return any(have_run)
        spent_s = self._active_at - began
        self.counters.compute_s += spent_s
        for call in calls:
            call.compute_s += spent_s
        for task, answer in zip(tasks, answers, strict=True):
            if task.advance(answer):
                self._schedule.rest(task)
            else:
                self._schedule.finish(task)
        return True

    def _answer_done(self) -> None:
        for call in [call for call in self._calls if call.is_done]:
            self._calls.remove(call)
            if call.has_failed:
                self._refuse(call.client, call.number, "failed")
                continue
            rows = tuple(_row_answer(answer) for answer in call.answers if answer)
            self._router.reply(call.client, DraftAnswer(call.number, rows, call.compute_s))

    def _drop(self, calls: list[Call], reason: Reason) -> None:
        if not calls:
            return
        self._schedule.drop(calls)
        for call in calls:
            self._calls.remove(call)
            self._refuse(call.client, call.number, reason)

    def _forget(self, client: bytes, texts: tuple[int, ...]) -> None:
        """Forgets these ended texts of a client, and answers the tasks that still wait for them."""
        keys = [(client, text) for text in texts]
        for key in keys:
            self._schedule.end_text(key)
        self._drafter.forget(keys)

    def _refuse(self, client: bytes, number: int, reason: Reason) -> None:
        if reason != "failed":  # failed rows are counted one by one
            self.counters.num_refused[reason] += 1
        self._router.reply(client, Refusal(number, reason))

    def _note_malformed(self, error: WireError) -> None:
        self.counters.num_refused["malformed"] += 1
        self._log_once("malformed message", str(error))

    def _note_refused(self) -> None:
        self.counters.num_refused["unauthorized"] += 1
        self._log_once("refused connection", "it came without this drafter's secret")

    def _log_once(self, kind: str, text: str, error: Exception | None = None) -> None:
        """Logs a problem if it is the first of its kind."""
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "%s: %s. Further ones are only counted", kind, shorten(text, 200), exc_info=error
            )


def _row_answer(answer: Answer) -> RowAnswer:
    chances = bytes([round(255 * chance) for chance in answer.chances])
    return RowAnswer(answer.held, answer.tokens, chances, answer.begin, answer.problem)


def _row(client: bytes, row: TextRow) -> Row:
    return Row(
        key=(client, row.text),
        salt=row.salt,
        start=row.start,
        tokens=row.tokens,
        states_start=row.states_start,
        states=row.states,
        max_draft_tokens=row.max_draft_tokens,
    )
