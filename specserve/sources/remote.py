"""Drafts of a model in another process: the draft model, or the MTP module.

A step sends what is new of each text and waits for the drafts, for at most ``timeout_s``. A drafter
that is late once is not waited for again before it has answered the health monitor.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from secrets import randbits
from typing import Self

import numpy as np

from specserve.core.errors import WireError
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.core.types import Draft, DraftBatch, RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.controls import DEFAULT_CONTROLS, wants_drafts
from specserve.sources.drafter_link import DrafterLink
from specserve.sources.health_monitor import Find, Peer, Wanted
from specserve.sources.pending_states import PendingStates
from specserve.sources.sent_requests import Room, SentRequests, Text
from specserve.trie.namespaces import namespace
from specserve.wire.messages import (
    MAX_ROWS,
    MAX_STATE_BYTES,
    MAX_TOKENS,
    DraftAnswer,
    DraftRequest,
    Refusal,
    TextRow,
)

NEAR_TOKENS = 64
"""Positions that a draft may wait for: some steps' tokens, or a short prompt. A text that lacks
more is brought up to date first, and nobody waits for that."""

FEED_TOKENS = 4096
"""Positions of a text that are brought up to date by one request."""

FEED_BUDGET_S = 60.0
"""How long such a request may wait for its turns, in seconds."""

MAX_SENT = 128
"""Requests on their way that a further text is sent with; the drafter refuses more than 256."""

PENDING_STATES = 32_768
"""Hidden states that wait to be confirmed, of all requests: some steps that read prompts. 448 MiB
where they have 7168 values."""

LOST_S = 1.0
"""An answer that comes so much later than its request's budget is not waited for."""

REST_S = 1.0
"""A text that the drafter has no room for, or cannot read, is sent again after so long."""

_USE_RATE, _IN_USE = 0.1, 0.5
"""A source that was asked for drafts in half of the last ten steps or so is in use."""

MOST_READING_S = 0.01
"""Time to read what has come: a drafter that floods must not hold a step up."""

_CHANCES = [number / 255 for number in range(256)]
"""By how they are sent."""

_Rows = list[tuple[int, Text, TextRow]]
"""Rows to send, each with its row of the batch."""


class DrafterClient:
    """Asks a drafter for drafts, and keeps it up to date.

    Args:
        config: the source's configuration.
        context: the replica.
        find: where the drafter is; called from a thread of its own.
    """

    def __init__(
        self, config: DraftModelConfig | MtpConfig, context: SourceContext, find: Find
    ) -> None:
        self._config = config
        self._kind = config.kind
        self._identity = context.model_identity
        self._metrics = context.metrics
        self._states = PendingStates(PENDING_STATES) if config.kind == "mtp" else None
        self._no_draft = Draft((), config.kind)
        hidden_size = context.hidden_size if config.kind == "mtp" else 0
        self._state_bytes = 2 * hidden_size
        wanted = Wanted(
            kind=config.kind,
            vocab_size=context.vocab_size,
            tokenizer=context.tokenizer,
            hidden_size=hidden_size,
            replica=context.replica,
        )
        self._link = DrafterLink(wanted, find, self._report)
        self._has_own_gpu = config.num_gpus > 0 and config.placement == "actor"
        self._peer: Peer | None = None
        self._has_failed = False  # at the last request for drafts
        self._texts: dict[str, Text] = {}
        self._num_texts = 0
        self._ended: deque[int] = deque(maxlen=MAX_ROWS)
        self._sent = SentRequests()
        self._use = 0.0 if config.dynamic else 1.0  # of one that may not pay nothing is known yet

    @classmethod
    def build(cls, config: DraftModelConfig | MtpConfig, context: SourceContext) -> Self:
        """For the registry."""
        proposer = cls(config, context, context.find_drafter(config))
        context.exits.append(proposer.close)
        return proposer

    def propose(self, batch: DraftBatch) -> list[Draft]:
        """Sends what is new of the batch's texts, and waits for drafts of those that are near."""
        texts = [self._text_of(batch, row) for row in range(len(batch))]
        self._use += _USE_RATE * (bool(batch.max_draft_tokens.any()) - self._use)
        self._keep_states(batch, texts)
        drafts = self._drafts(batch, texts)
        if self._states is not None:
            self._states.trim()
        return drafts

    def reading_s(self, batch: DraftBatch) -> list[float]:
        """How long the drafter would compute what it lacks of each text before it can draft.

        Nothing is put off where states would be lost meanwhile. A drafter with a GPU of its own
        takes no time of the target's.

        Returns:
            n times seconds; 0 where it lacks little, infinite where it is reading the text now, NaN
            where it has no room for it.
        """
        is_free = self._has_own_gpu or self._is_full
        position_s = 0.0 if is_free else self._sent.position_s
        most = math.inf if self._peer is None else self._peer.max_tokens
        found, now = [], time.monotonic()
        for request_id, length in zip(batch.request_ids, batch.num_tokens.tolist(), strict=True):
            text = self._texts.get(request_id)
            lacking = length if text is None else length - self._unsent(text, length)[0]
            if length > most or (text is not None and text.rests_until > now):
                found.append(math.nan)
            elif text is not None and text.is_sent:
                found.append(math.inf)
            else:
                found.append(lacking * position_s if lacking > NEAR_TOKENS else 0.0)
        return found

    def forget(self, request_ids: list[str]) -> None:
        """Tells the drafter with the next request, or at once where none is to be expected."""
        for request_id in request_ids:
            text = self._texts.pop(request_id, None)
            if text is None:
                continue
            if text.was_sent:
                self._ended.append(text.number)
            if self._states is not None:
                self._states.forget(text.states)
        if self._ended and self._peer and not any(each.was_sent for each in self._texts.values()):
            self._send([], FEED_BUDGET_S)

    def close(self) -> None:
        """Ends the link."""
        self._peer = None
        self._link.close()

    def _report(self, up: bool, reason: str) -> None:
        """Called by the health monitor's thread."""
        self._metrics.set_reachable(self._kind, up, reason)

    def _drafts(self, batch: DraftBatch, texts: list[Text | None]) -> list[Draft]:
        drafts = [self._no_draft] * len(batch)
        if self._sent:
            for _ in self._replies():  # before a new connection would lose them
                pass
        peer = self._link.connect()
        if peer is None:
            return drafts
        self._sent.give_up(time.monotonic() - LOST_S)
        if peer is not self._peer:
            self._meet(peer)
        is_told_all = self._is_told_all
        if not (is_told_all or batch.max_draft_tokens.any()):
            return drafts  # nothing would be sent
        asked, fed = self._rows(batch, texts, peer.max_tokens, is_told_all)
        number = self._send(asked, self._config.timeout_s) if asked else 0
        for each in fed:  # each for itself: a short one is not answered with the longest
            self._send([each], FEED_BUDGET_S, is_read=True)
        if asked and (answer := self._await(number)) is not None:
            for (row, _, sent), answered in zip(asked, answer.rows, strict=True):
                if answered.tokens:
                    chances = tuple(map(_CHANCES.__getitem__, answered.chances))
                    draft = Draft(answered.tokens, self._kind, chances=chances)
                    drafts[row] = draft.cut(sent.max_draft_tokens)
        return drafts

    def _text_of(self, batch: DraftBatch, row: int) -> Text | None:
        """A request's text; None: it wants no drafts of this source."""
        controls = batch.controls[row] if batch.controls else DEFAULT_CONTROLS
        if not wants_drafts(controls, self._kind):
            return None
        text = self._texts.get(batch.request_ids[row])
        if text is None:
            text = Text(self._num_texts, self._salt(controls))
            self._texts[batch.request_ids[row]] = text
            self._num_texts += 1
        return text

    def _salt(self, controls: RequestControls) -> int:
        """Equal for those that may find out that others have sent the same text before."""
        if not controls.learn:
            return randbits(64)
        name = namespace(self._identity, controls.adapter, controls.tenant)
        salted = f"{name}\0{controls.cache_salt}"
        return int.from_bytes(blake2b(salted.encode(), digest_size=8).digest(), "little")

    def _keep_states(self, batch: DraftBatch, texts: list[Text | None]) -> None:
        """Keeps the step's states, but for those of refused drafts: the last token has none yet."""
        hidden = batch.hidden_states
        if self._states is None or hidden is None or not any(texts):
            return
        values, begin, now = hidden.to_host(), 0, time.monotonic()
        lengths = batch.num_tokens.tolist()
        for text, size, start, length in zip(
            texts, hidden.num_tokens, hidden.starts, lengths, strict=True
        ):
            if text is not None and (text.has_room or text.rests_until <= now):
                valid = max(0, min(size, length - 1 - start))
                self._states.add(text.states, start, values[begin : begin + valid])
            begin += size

    def _meet(self, peer: Peer) -> None:
        """It answers again: what was sent for longer may be under way, but for a new connection."""
        old = self._peer
        is_lost = old is None or old.route != peer.route
        self._sent.give_up(math.inf if is_lost else time.monotonic())
        if old is None or old.instance != peer.instance:
            self._sent.position_s = 0.0  # it may take another time
            for text in self._texts.values():
                text.held, text.has_room, text.rests_until = 0, True, 0.0
        self._peer = peer

    def _rows(
        self, batch: DraftBatch, texts: list[Text | None], max_tokens: int, is_told_all: bool
    ) -> tuple[_Rows, _Rows]:
        """What is to be sent: rows to be drafted for, and rows of texts that lack too much."""
        asked: _Rows = []
        fed: _Rows = []
        room = Room(MAX_ROWS, MAX_TOKENS, MAX_STATE_BYTES)
        feed_room = Room(
            MAX_SENT - len(self._sent), MAX_TOKENS, MAX_STATE_BYTES - self._sent.state_bytes
        )
        limits = np.minimum(batch.max_draft_tokens, self._config.max_draft_len).tolist()
        now = time.monotonic()
        for row, (text, length) in enumerate(zip(texts, batch.num_tokens.tolist(), strict=True)):
            if text is None or text.is_sent or text.rests_until > now or length > max_tokens:
                continue
            begin, end = self._unsent(text, length)
            is_near = end - begin <= NEAR_TOKENS
            if is_near and not (end == length and limits[row]):
                continue
            if not (limits[row] or is_told_all):
                continue  # it would be computed for nothing, perhaps on the target's own cores
            end = min(end, begin + FEED_TOKENS)
            start = min(text.held, end - 1)
            size = end - start, self._state_bytes * (end - begin)
            if is_near and room.take(*size):
                asked.append((row, text, self._row(batch, row, text, start, end, limits[row])))
            elif not is_near and feed_room.take(*size):
                fed.append((row, text, self._row(batch, row, text, start, end, 0)))
        return asked, fed

    @property
    def _is_told_all(self) -> bool:
        """Whether texts are sent also while no draft of them is wanted.

        Where none may ever be, they wait as long as no state is lost by it.
        """
        return self._use >= _IN_USE and (self._is_full or not self._config.dynamic)

    @property
    def _is_full(self) -> bool:
        """Whether states may soon be lost."""
        return self._states is not None and self._states.num_tokens > PENDING_STATES // 2

    def _unsent(self, text: Text, length: int) -> tuple[int, int]:
        """First position that the drafter will compute, and the end of what can be sent.

        With states, position i is computed of the state of i and the token at i + 1.
        """
        if self._states is None:
            return text.held, length
        return text.states.start(text.held), min(text.states.end + 1, length)

    def _row(
        self, batch: DraftBatch, row: int, text: Text, start: int, end: int, limit: int
    ) -> TextRow:
        states_start, states = 0, None
        if self._states is not None:
            states_start = text.states.start(start)
            if states_start < end - 1:
                states = text.states.between(states_start, end - 1)
        return TextRow(
            text=text.number,
            salt=text.salt,
            start=start,
            tokens=batch.token_ids[row, start:end],
            states_start=states_start,
            states=states,
            max_draft_tokens=limit,
        )

    def _send(self, rows: _Rows, budget_s: float, *, is_read: bool = False) -> int:
        """Sends a request; returns its number."""
        ended, self._ended = tuple(self._ended), deque(maxlen=MAX_ROWS)
        states = (row.states for _, _, row in rows)
        number = self._sent.add(
            [text for _, text, _ in rows],
            sum(each.nbytes for each in states if each is not None),
            sum(row.num_computed for _, _, row in rows) if is_read else 0,
            budget_s,
        )
        request = DraftRequest(
            number=number,
            budget_s=budget_s,
            rows=tuple(row for _, _, row in rows),
            forget=ended,
        )
        self._link.send(request)
        return number

    def _await(self, number: int) -> DraftAnswer | None:
        """The answer to a request, if it comes in time."""
        for reply in self._replies(time.monotonic() + self._config.timeout_s):
            if reply.number == number:
                if isinstance(reply, DraftAnswer):
                    self._has_failed = False
                    self._link.reset()
                    return reply
                if reply.reason == "failed":
                    if self._has_failed:
                        self._link.trip("its model fails; its log says why")
                    self._has_failed = True
                return None
        self._metrics.count_timeout(self._kind)
        self._link.trip(f"no answer within timeout_s ({self._config.timeout_s:g} s)")
        return None

    def _replies(self, deadline: float = 0.0) -> Iterator[DraftAnswer | Refusal]:
        """Takes what comes until a monotonic time; without one, what has come."""
        end = max(deadline, time.monotonic() + MOST_READING_S)
        while time.monotonic() < end:
            try:
                reply = self._link.receive(deadline - time.monotonic())
            except WireError:
                self._metrics.count_error(self._kind)
                continue
            if reply is None:
                return
            if isinstance(reply, DraftAnswer | Refusal) and self._take(reply):
                yield reply

    def _take(self, reply: DraftAnswer | Refusal) -> bool:
        """Notes what is held now; false: the reply is none to what was sent."""
        sent = self._sent.take(reply)
        if sent is None:
            return False
        if isinstance(reply, Refusal):
            if reply.reason != "expired":
                self._metrics.count_error(self._kind)
            if reply.reason == "failed" and sent.num_read:
                for text in sent.texts:
                    text.rests_until = time.monotonic() + REST_S
            return True
        if len(reply.rows) != len(sent.texts):
            self._metrics.count_error(self._kind)
            return False
        for text, row in zip(sent.texts, reply.rows, strict=True):
            if row.problem == "failed":
                text.rests_until = time.monotonic() + REST_S
            elif row.problem == "unfit":
                self._give_up(text, math.inf)
            elif not (text.held or row.held):
                self._give_up(text, time.monotonic() + REST_S)
            else:
                text.has_room = True
            text.held = row.held
            if row.begin and not text.is_partial:
                text.is_partial = True
                self._metrics.count_partial_text(self._kind)
            if self._states is not None:
                self._states.confirm(text.states, row.held)
        return True

    def _give_up(self, text: Text, until: float) -> None:
        """The drafter takes nothing of a text: its states would push out those of the others."""
        text.has_room, text.rests_until = False, until
        if self._states is not None:
            self._states.forget(text.states)
