"""What a drafter does next: drafts first, long texts piece by piece between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from msgspec.structs import replace

from specserve.drafters.base import Answer, Key, Row

FEED_TOKENS = 256
"""Positions of long texts that are computed at a time; a draft waits for no more than that."""


@dataclass(slots=True, eq=False)
class Call:
    """A client's request while it is worked on.

    Attributes:
        number: the client's number for it.
        expires_at: monotonic time after which nobody waits for it.
        num_bytes: what it takes of memory.
        answers: one for each row, as far as they are there.
        compute_s: time spent so far on calls that its rows were part of, in seconds.
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
        """Whether nothing came of any row."""
        return 0 < self.num_failed == len(self.answers)

    @property
    def is_done(self) -> bool:
        """Whether each row has its answer."""
        return None not in self.answers


class Task:
    """A row of a call, and how far it has been brought.

    Args:
        call: whose.
        index: of the row in the call.
        row: all of it.

    Attributes:
        begin: first position of the next piece that takes time; where states are missing none does.
        end: end of the next piece.
        is_last: whether the next piece is all that is left.
        wants_draft: whether a draft follows the next piece.
    """

    __slots__ = ("begin", "call", "done", "end", "index", "is_last", "row", "wants_draft")

    def __init__(self, call: Call, index: int, row: Row) -> None:
        self.call = call
        self.index = index
        self.row = row
        self._bring_to(row.start)

    def _bring_to(self, done: int) -> None:
        """The drafter holds the text up to here."""
        row = self.row
        self.done = done
        self.begin = done if row.states is None else max(done, row.states_start)
        self.end = min(self.begin + FEED_TOKENS, row.num_tokens)
        self.is_last = self.end == row.num_tokens
        self.wants_draft = self.is_last and row.max_draft_tokens > 0

    def piece(self) -> Row:
        """What the drafter is told next: all that is left, of which it computes one piece."""
        row = self.row
        if self.is_last and self.done == row.start:
            return row
        tokens = row.tokens[self.done - row.start :]
        return replace(row, start=self.done, tokens=tokens, max_feed_tokens=FEED_TOKENS)

    def advance(self, answer: Answer) -> bool:
        """Takes the answer to the piece; false: that was the last one.

        So it is too where the drafter has forgotten the text, or has no place for more of it.
        """
        is_done = self.is_last or bool(answer.tokens)
        if not is_done and self.done < answer.held <= self.row.num_tokens:
            self._bring_to(answer.held)
            return True
        self.call.answers[self.index] = answer
        return False


class Schedule:
    """Tasks that wait: the texts take turns, a text's own tasks go one after the other."""

    def __init__(self) -> None:
        self._queues: dict[Key, deque[Task]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, task: Task) -> None:
        """Comes after all that wait."""
        self._queues.setdefault(task.row.key, deque()).append(task)

    def drafts(self) -> list[Task]:
        """All tasks that a draft follows now, one for a text."""
        return [queue[0] for queue in self._queues.values() if queue[0].wants_draft]

    def feed(self) -> list[Task]:
        """The next other tasks, as many as make up a piece, one for a text."""
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
        """The other texts have their turns first."""
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
        """Nothing comes of a text's first task; what is held of the text stays."""
        self.finish(task)
        task.call.answers[task.index] = Answer(task.row.start, problem="failed")
        task.call.num_failed += 1

    def end_text(self, key: Key) -> None:
        """The text has ended: nothing of it will be held."""
        for task in self._queues.pop(key, ()):
            task.call.answers[task.index] = Answer(0)
