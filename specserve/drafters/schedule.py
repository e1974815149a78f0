"""The order of a drafter's work: drafts first, and between them pieces of long texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from msgspec.structs import replace

from specserve.drafters.base import Answer, Key, Row

FEED_TOKENS = 256
"""Most positions of long texts computed in one model call, and so between two drafts."""


@dataclass(slots=True, eq=False)
class Call:
    """A client's request in progress.

    Attributes:
        number: the client's number for it.
        expires_at: monotonic time in seconds after which nobody waits for the answer.
        num_bytes: memory that it takes, in bytes.
        answers: one for each row; None: not computed yet.
        compute_s: duration so far of the model calls with rows of this request, in seconds.
        num_failed: rows for which the model raised.
    """

    client: bytes
    number: int
    expires_at: float
    num_bytes: int
    answers: list[Answer | None]
    compute_s: float = 0.0
    num_failed: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether the model raised for every row."""
        return 0 < self.num_failed == len(self.answers)

    @property
    def is_done(self) -> bool:
        """Whether each row has its answer."""
        return None not in self.answers


class Task:
    """A row of a call, and how far it has been computed.

    Args:
        call: the call of the row.
        index: the row's index in the call.
        row: the whole row.

    Attributes:
        begin: first position to compute next; positions without hidden states are skipped.
        end: end of the next piece.
        is_last: whether the next piece is the last one.
        wants_draft: whether a draft follows the next piece.
    """

    __slots__ = ("begin", "call", "done", "end", "index", "is_last", "row", "wants_draft")

    def __init__(self, call: Call, index: int, row: Row) -> None:
        self.call = call
        self.index = index
        self.row = row
        self._set_done(row.start)

    def _set_done(self, done: int) -> None:
        """Notes that the drafter holds the text up to ``done``, and sets the next piece."""
        row = self.row
        self.done = done
        self.begin = done if row.states is None else max(done, row.states_start)
        self.end = min(self.begin + FEED_TOKENS, row.num_tokens)
        self.is_last = self.end == row.num_tokens
        self.wants_draft = self.is_last and row.max_draft_tokens > 0

    def piece(self) -> Row:
        """The row for the next model call: the rest of the text, of which it computes one piece."""
        row = self.row
        if self.is_last and self.done == row.start:
            return row
        tokens = row.tokens[self.done - row.start :]
        return replace(row, start=self.done, tokens=tokens, max_feed_tokens=FEED_TOKENS)

    def advance(self, answer: Answer) -> bool:
        """Takes the answer to a piece; returns whether another piece follows.

        None follows if the drafter has forgotten the text, or has no room for more of it.
        """
        is_done = self.is_last or bool(answer.tokens)
        if not is_done and self.done < answer.held <= self.row.num_tokens:
            self._set_done(answer.held)
            return True
        self.call.answers[self.index] = answer
        return False


class Schedule:
    """Tasks that wait: texts take turns, and the tasks of one text run in order."""

    def __init__(self) -> None:
        self._queues: dict[Key, deque[Task]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, task: Task) -> None:
        """Appends a task to its text's queue; a new text comes last."""
        self._queues.setdefault(task.row.key, deque()).append(task)

    def drafts(self) -> list[Task]:
        """The first task of each text, if a draft follows its next piece."""
        return [queue[0] for queue in self._queues.values() if queue[0].wants_draft]

    def feed(self) -> list[Task]:
        """Other first tasks, one per text; their pieces have at most ``FEED_TOKENS`` positions."""
        taken: list[Task] = []
        num_positions = 0
        for queue in self._queues.values():
            task = queue[0]
            if task.wants_draft:
                continue
            num_positions += task.end - task.begin
            if taken and num_positions > FEED_TOKENS:
                break
            taken.append(task)
        return taken

    def rest(self, task: Task) -> None:
        """Moves the task's text behind the other texts."""
        self._queues[task.row.key] = self._queues.pop(task.row.key)

    def drop(self, calls: Collection[Call]) -> None:
        """Removes all tasks of these calls."""
        for key, queue in list(self._queues.items()):
            if kept := [task for task in queue if task.call not in calls]:
                self._queues[key] = deque(kept)
            else:
                del self._queues[key]

    def finish(self, task: Task) -> None:
        """Removes a text's first task."""
        queue = self._queues[task.row.key]
        first = queue.popleft()
        assert first is task
        if not queue:
            del self._queues[task.row.key]

    def fail(self, task: Task) -> None:
        """Answers a text's first task as failed; the drafter still holds what it held before."""
        self.finish(task)
        task.call.answers[task.index] = Answer(task.row.start, problem="failed")
        task.call.num_failed += 1

    def end_text(self, key: Key) -> None:
        """Answers all tasks of a text that has ended: the drafter holds nothing of it."""
        for task in self._queues.pop(key, ()):
            task.call.answers[task.index] = Answer(0)
