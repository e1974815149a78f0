"""What has been sent to a drafter and is not answered yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.sources.pending_states import TextStates
from specserve.wire.messages import DraftAnswer, Refusal

_READING_RATE = 0.1
"""Weight of a new measurement of what reading takes."""


@dataclass(slots=True, eq=False)
class Text:
    """A request's text as the drafter knows it.

    Attributes:
        number: its name.
        salt: who may share its beginning.
        held: positions that the drafter holds, by its last answer.
        is_sent: a request with a row of it is not answered yet.
        was_sent: the drafter may know it.
        is_partial: the drafter once had to begin it behind a gap.
        has_room: the drafter was not seen to have no room for it.
        rests_until: monotonic time before which it is not sent: the drafter could not take it.
        states: the target's, for a drafter that continues them.
    """

    number: int
    salt: int
    held: int = 0
    is_sent: bool = False
    was_sent: bool = False
    is_partial: bool = False
    has_room: bool = True
    rests_until: float = 0.0
    states: TextStates = field(default_factory=TextStates)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that is not answered yet.

    Attributes:
        texts: of its rows.
        state_bytes: size of their states.
        num_read: positions of a text that is only brought up to date; 0: drafts are waited for.
        expires_at: monotonic time when its budget is over.
    """

    texts: Sequence[Text]
    state_bytes: int
    num_read: int
    expires_at: float


@dataclass(slots=True)
class Room:
    """What more may be sent in this step."""

    rows: int
    tokens: int
    state_bytes: int

    def take(self, tokens: int, state_bytes: int) -> bool:
        """Whether there is room for a row, which then is taken."""
        if self.rows <= 0 or tokens > self.tokens or state_bytes > self.state_bytes:
            return False
        self.rows -= 1
        self.tokens -= tokens
        self.state_bytes -= state_bytes
        return True


class SentRequests:
    """The requests that are not answered yet; a text is in one of them at most.

    Attributes:
        position_s: what it takes the drafter to read a position of a text, in seconds; 0 before
            the first was measured.
    """

    def __init__(self) -> None:
        self.position_s = 0.0
        self._sent: dict[int, Sent] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def state_bytes(self) -> int:
        """Size of all states that are under way."""
        return sum(each.state_bytes for each in self._sent.values())

    def add(self, texts: Sequence[Text], state_bytes: int, num_read: int, budget_s: float) -> int:
        """Notes a request.

        Args:
            texts: of its rows.
            state_bytes: size of their states.
            num_read: positions of a text that is only brought up to date; 0: drafts are waited for.
            budget_s: how long the answer is of use, in seconds.

        Returns:
            The request's number.
        """
        for text in texts:
            text.is_sent = text.was_sent = True
        self._num_requests += 1
        expires_at = time.monotonic() + budget_s
        self._sent[self._num_requests] = Sent(texts, state_bytes, num_read, expires_at)
        return self._num_requests

    def give_up(self, latest: float) -> None:
        """Requests whose budget was over before are not waited for; their texts go out again."""
        for number, sent in list(self._sent.items()):
            if sent.expires_at < latest:
                self._end(number)

    def take(self, reply: DraftAnswer | Refusal) -> Sent | None:
        """The request that a reply is to; None: it is none to what was sent."""
        sent = self._end(reply.number)
        if sent is None:
            return None
        if sent.num_read and isinstance(reply, DraftAnswer) and _has_progress(sent, reply):
            weight = _READING_RATE if self.position_s else 1.0
            self.position_s += weight * (reply.compute_s / sent.num_read - self.position_s)
        return sent

    def _end(self, number: int) -> Sent | None:
        sent = self._sent.pop(number, None)
        for text in sent.texts if sent is not None else ():
            text.is_sent = False
        return sent


def _has_progress(sent: Sent, reply: DraftAnswer) -> bool:
    """Whether more is held than before: a drafter without room for a text does not read it."""
    pairs = zip(sent.texts, reply.rows, strict=False)
    return any(row.held > text.held for text, row in pairs)
