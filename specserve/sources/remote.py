"""Drafts of a model in another process: the draft model, or the MTP module.

A step sends what is new of each text and waits for the drafts, for at most ``timeout_s``. A drafter
that is late once is not waited for again before it has answered the health monitor.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain, compress
from secrets import randbits

import numpy as np

from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.core.types import (
    BoolArray,
    DraftBatch,
    DraftBuffer,
    Drafts,
    Float64Array,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.sources.controls import wants_drafts
from specserve.sources.drafter_link import LOST_S, DrafterLink, Sent
from specserve.sources.drafter_texts import DrafterTexts
from specserve.sources.followed_texts import FollowedTexts
from specserve.sources.health_monitor import HealthMonitor, Peer, Wanted
from specserve.sources.pending_states import PendingStates
from specserve.trie.namespaces import namespace
from specserve.wire.messages import (
    MAX_ROWS,
    MAX_STATE_BYTES,
    MAX_TOKENS,
    DraftAnswer,
    Refusal,
    RowAnswer,
    TextRow,
)

NEAR_TOKENS = 64
"""Positions that a draft may wait for: some steps' tokens, or a short prompt. A text that lacks
more is read first, and nobody waits for that."""

FEED_TOKENS = 4096
"""Positions of a text that are read by one request."""

FEED_BUDGET_S = 60.0
"""How long such a request may wait for its turns, in seconds."""

MAX_SENT = 128
"""Requests on their way that a further text is sent with; the drafter refuses more than 256."""

PENDING_STATES = 32_768
"""Hidden states that wait to be confirmed, of all requests: some steps that read prompts. 448 MiB
where they have 7168 values."""

REST_S = 1.0
"""A text that the drafter has no room for, or cannot read, is sent again after so long."""

_READING_RATE = 0.1
"""Weight of a new measurement of what reading takes."""


class DrafterClient:
    """Asks a drafter for drafts, and keeps it up to date: a remote source.

    A text that lacks much is read first: where states are continued, from its next step on, so that
    no step waits for the copy of a prompt's states. A text of which states are missing is drafted
    for from behind the gap.
    """

    def __init__(self, config: DraftModelConfig | MtpConfig, context: SourceContext) -> None:
        self._config, self._kind = config, config.kind
        self._identity, self._metrics = context.model_identity, context.metrics
        hidden_size = context.hidden_size if config.NEEDS_STATES else 0
        wanted = Wanted(
            kind=config.kind,
            vocab_size=context.vocab_size,
            tokenizer=context.tokenizer,
            hidden_size=hidden_size,
            replica=context.replica,
        )
        self._monitor = HealthMonitor(
            wanted,
            context.find_drafter(config),
            partial(context.metrics.set_reachable, config.kind),
        )
        self._link = DrafterLink(partial(context.metrics.count_error, config.kind))
        self._peer: Peer | None = None  # the last one that was met
        self._has_failed = False  # at the last request for drafts
        self._has_own_gpu = config.num_gpus > 0 and config.placement == "actor"
        self._position_s = 0.0  # what reading a position takes; 0 before it was measured
        num_slots = context.num_slots
        self._states = PendingStates(num_slots, PENDING_STATES) if config.NEEDS_STATES else None
        self._followed = FollowedTexts(num_slots, always=not config.dynamic)
        self._ended: deque[int] = deque(maxlen=MAX_ROWS)
        self._drafts = DraftBuffer(num_slots, config.max_draft_len)
        self._texts = DrafterTexts(num_slots)
        self._is_behind = np.zeros(num_slots, np.bool_)  # by slot: to be read in this step
        self._are_behind = False  # some of them
        context.exits.append(self.end)

    def open(self, slot: int, controls: RequestControls) -> None:
        """See :meth:`specserve.sources.base.Source.open`."""
        wants = wants_drafts(controls, self._kind)
        self._texts.open(slot, self._salt_of(controls), is_wanted=wants)
        if wants and self._states is not None:
            self._followed.open(slot)

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts:
        """Sends what is new of texts, and waits for the drafts that are asked for."""
        drafts = self._drafts.rows(len(limits))
        drafts.lengths[:] = 0
        if self._link.sent:
            self._read_replies()  # before a new connection would lose them
        peer, is_sent, slots = self._meet(), limits > 0, batch.slots
        if self._states is not None:
            self._followed.note(slots[is_sent], is_there=peer is not None)
        if self._are_behind:
            is_sent |= self._is_behind[slots]
        if self._is_full or not self._config.dynamic:
            is_sent[:] = True
        if peer is None or not np.count_nonzero(is_sent):
            self._keep_states(batch)
            return drafts  # nothing is to be sent
        is_sent &= self._texts.may_be_sent(slots)
        is_sent &= batch.num_tokens <= min(peer.max_tokens, MAX_TOKENS)
        (rows,) = is_sent.nonzero()
        # What is only read is sent up to the last step's states: this one's are not there yet.
        read, rows = self._read(batch, rows)
        self._keep_states(batch)
        number, rows = self._ask(batch, rows, limits)
        for slot, row in read:  # each for itself: a short one is not answered with the longest
            self._send(slot, [row], FEED_BUDGET_S, row.num_computed)
        if number and (answer := self._await(number)) is not None:
            self._fill(drafts, rows, answer, limits)
            if np.count_nonzero(drafts.lengths):
                self._followed.answered()
        return drafts

    def reading_s(self, batch: DraftBatch) -> Float64Array:
        """How long the drafter would compute what it lacks of each text before it can draft.

        A drafter with a GPU of its own takes no time of the target's. Nothing is put off where
        states would be lost meanwhile.

        Returns:
            float64 ``[n]``, seconds; 0 where it lacks little, infinite where it is reading the text
            now, NaN where it has no room for it, and of all while there is no drafter.
        """
        slots, num_tokens = batch.slots, batch.num_tokens
        seconds = np.zeros(len(slots))
        if (peer := self._monitor.peer) is None:
            seconds[:] = np.nan
            return seconds
        if self._position_s and not (self._has_own_gpu or self._is_full):
            begins = self._texts.held[slots]
            if self._states is not None and batch.hidden_states is not None:
                begins = np.maximum(begins, self._states.first(slots, batch.hidden_states))
            lacking = num_tokens - begins
            seconds[:] = np.where(lacking > NEAR_TOKENS, lacking * self._position_s, 0.0)
        is_unfit = ~self._texts.may_be_sent(slots)
        is_unfit |= num_tokens > peer.max_tokens
        if np.count_nonzero(is_unfit):
            seconds[is_unfit] = np.nan
            seconds[self._texts.are_under_way(slots)] = np.inf
        return seconds

    def must_see(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: texts that are followed: states of a step without this source are lost.

        A text of which states were lost is begun anew behind the gap.
        """
        if self._states is None:
            return np.zeros(len(slots), np.bool_)
        return self._followed.which(slots)

    def follow_next(self) -> bool:
        """See :meth:`RemoteSource.follow_next`."""
        self._followed.follow_next()
        return self._states is not None

    def close(self, slots: Int64Array) -> None:
        """Tells the drafter with the next request, or at once where none is to be expected."""
        self._ended.extend(self._texts.close(slots))
        if self._states is not None:
            self._followed.close(slots)
            for slot in slots.tolist():
                self._states.close(slot)
        if self._ended and self._peer is not None and not self._texts.is_any_known:
            self._send(slots[:0], [], FEED_BUDGET_S)

    def end(self) -> None:
        """Ends the monitor's thread and the link."""
        self._peer = None
        self._monitor.close()
        self._link.close()

    @property
    def _is_full(self) -> bool:
        """Whether states may soon be lost."""
        return self._states is not None and self._states.num_tokens > PENDING_STATES // 2

    def _salt_of(self, controls: RequestControls) -> int:
        """Equal for those that may find out that others have sent the same text before."""
        if not controls.learn:
            return randbits(64)
        name = namespace(self._identity, controls.adapter, controls.tenant)
        salted = f"{name}\0{controls.cache_salt}"
        return int.from_bytes(blake2b(salted.encode(), digest_size=8).digest(), "little")

    def _meet(self) -> Peer | None:
        """The drafter to ask in this step, connected to; None: there is none."""
        peer, known = self._monitor.peer, self._peer
        if peer is None or peer is known:
            return peer
        is_other = known is None or known.instance != peer.instance
        if known is None or is_other or known.connection != peer.connection:
            self._link.connect(peer.endpoint)
            self._give_up(math.inf)
        if is_other:
            self._position_s = 0.0  # it may take another time
            self._texts.begin_anew()
        self._peer = peer
        return peer

    def _keep_states(self, batch: DraftBatch) -> None:
        """Starts to copy the step's states of the texts that are followed."""
        slots, hidden = batch.slots, batch.hidden_states
        if self._states is None or hidden is None:
            return
        is_kept = self._followed.which(slots)
        has_room = self._texts.has_room
        if np.count_nonzero(has_room) < len(has_room):
            is_kept = is_kept & (has_room[slots] | self._texts.may_be_sent(slots))
        (rows,) = is_kept.nonzero()
        if rows.size:
            self._states.add(slots[rows], batch.num_tokens[rows], hidden, rows)

    def _lacking(self, batch: DraftBatch, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """int64 ``[r]``, ``[r]``: the first position that the drafter will compute of each text,
        and the end of what can be sent.

        With states, position i is computed of the state of i and the token at i + 1.
        """
        slots, begins = batch.slots[rows], self._texts.held[batch.slots[rows]]
        ends = batch.num_tokens[rows].astype(np.int64)
        if self._states is None:
            return begins, ends
        ends = np.minimum(self._states.ends[slots] + 1, ends)
        return np.maximum(begins, self._states.starts[slots]), ends

    def _read(
        self, batch: DraftBatch, rows: Int64Array
    ) -> tuple[list[tuple[Int64Array, TextRow]], Int64Array]:
        """What is sent of texts that lack much, each with its slot; the other ones of ``rows``."""
        if self._states is not None and not self._are_behind:
            return [], rows
        begins, ends = self._lacking(batch, rows)
        lacks = ends - begins > NEAR_TOKENS
        if not np.count_nonzero(lacks):
            return [], rows
        ends = np.minimum(ends, begins + FEED_TOKENS)[lacks]
        room = MAX_STATE_BYTES - sum(each.state_bytes for each in self._link.sent.values())
        most = max(MAX_SENT - len(self._link.sent), 0)
        read = rows[lacks]
        none = np.zeros(len(read), np.int32)
        sent = self._texts.rows(batch, read[:most], ends[:most], none[:most], self._states, room)
        return list(zip(batch.slots[read, None], sent, strict=False)), rows[~lacks]

    def _ask(
        self, batch: DraftBatch, rows: Int64Array, limits: Int32Array
    ) -> tuple[int, Int64Array]:
        """Asks for drafts of those of these rows that lack little.

        Returns:
            (the request's number, 0: there is none; its rows).
        """
        begins, ends = self._lacking(batch, rows)
        is_near = ends - begins <= NEAR_TOKENS
        is_asked = is_near & (limits[rows] > 0)
        if self._states is not None:
            behind = batch.slots[rows[~is_near]]
            self._are_behind = behind.size > 0
            self._is_behind[:] = False
            self._is_behind[behind] = True
            is_asked &= ends == batch.num_tokens[rows]
        if not (rows := rows[is_asked]).size:
            return 0, rows
        most = np.minimum(limits[rows], self._config.max_draft_len)
        ends = ends[is_asked]
        sent = self._texts.rows(batch, rows, ends, most, self._states, MAX_STATE_BYTES)
        rows = rows[: len(sent)]
        return self._send(batch.slots[rows], sent, self._config.timeout_s), rows

    def _send(
        self, slots: Int64Array, rows: Sequence[TextRow], budget_s: float, num_read: int = 0
    ) -> int:
        """Sends a request, and which texts have ended; returns its number."""
        number = self._link.send(slots, rows, self._ended, budget_s, num_read)
        self._ended.clear()
        self._texts.send(slots, number)
        return number

    def _await(self, number: int) -> DraftAnswer | None:
        """The answer to a request, if it comes in time."""
        for sent, reply in self._link.replies(time.monotonic() + self._config.timeout_s):
            if self._take(sent, reply) and reply.number == number:
                if isinstance(reply, DraftAnswer):
                    self._has_failed = False
                    self._monitor.reset()
                    return reply
                if reply.reason == "failed":
                    if self._has_failed:
                        self._monitor.trip("its model fails; its log says why")
                    self._has_failed = True
                return None
        self._metrics.count_timeout(self._kind)
        self._monitor.trip(f"no answer within timeout_s ({self._config.timeout_s:g} s)")
        return None

    def _read_replies(self) -> None:
        """Takes what has come, and gives up what will not come any more."""
        for sent, reply in self._link.replies():
            self._take(sent, reply)
        self._give_up(time.monotonic() - LOST_S)

    def _give_up(self, latest: float) -> None:
        for sent in self._link.give_up(latest):
            self._texts.settle(sent.slots, sent.number)

    def _take(self, sent: Sent, reply: DraftAnswer | Refusal) -> bool:
        """Notes what is held now; false: the reply is none to what was sent."""
        is_own = self._texts.settle(sent.slots, sent.number)
        slots = sent.slots[is_own]
        if isinstance(reply, Refusal):
            if reply.reason != "expired":
                self._metrics.count_error(self._kind)
            if reply.reason == "failed" and sent.num_read:
                self._texts.rest(slots, REST_S)
            return True
        if len(reply.rows) != len(sent.slots):
            self._metrics.count_error(self._kind)
            return False
        rows = list(compress(reply.rows, is_own))
        held = np.array([row.held for row in rows], np.int64)
        if sent.num_read and (held > self._texts.held[slots]).any():  # else it was not read
            weight = _READING_RATE if self._position_s else 1.0
            self._position_s += weight * (reply.compute_s / sent.num_read - self._position_s)
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if row.problem or row.begin or not row.held:
                self._note_trouble(slot, row)
            if self._states is not None:
                self._states.confirm(slot, row.held)
        self._texts.held[slots] = held
        return True

    def _note_trouble(self, slot: int, row: RowAnswer) -> None:
        """A text was not taken, or not whole."""
        is_refused = self._texts.is_refused(slot, row)
        if self._texts.begins_partial(slot, row):
            self._metrics.count_partial_text(self._kind)
        if is_refused:  # its states would push out those of the others
            self._texts.has_room[slot] = False
            if self._states is not None:
                self._states.drop(slot)
        if is_refused or row.problem:
            of_slot = np.array([slot])
            self._texts.rest(of_slot, math.inf if row.problem == "unfit" else REST_S)

    def _fill(
        self, drafts: Drafts, rows: Int64Array, answer: DraftAnswer, limits: Int32Array
    ) -> None:
        """Takes over the drafts of an answer to some rows of the batch."""
        tokens: list[tuple[int, ...]] = []
        chances: list[bytes] = []
        for limit, row in zip(limits[rows].tolist(), answer.rows, strict=True):
            is_good = len(row.tokens) == len(row.chances)
            if not is_good:
                self._metrics.count_error(self._kind)
            tokens.append(row.tokens[:limit] if is_good else ())
            chances.append(row.chances[:limit] if is_good else b"")
        drafts.lengths[rows] = [len(each) for each in tokens]
        is_drafted = np.arange(drafts.tokens.shape[1]) < drafts.lengths[:, None]
        drafts.tokens[is_drafted] = list(chain.from_iterable(tokens))
        drafts.confidence[is_drafted] = np.frombuffer(b"".join(chances), np.uint8) / 255
