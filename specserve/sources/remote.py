"""Drafts from a model in another process: the draft model or the MTP module.

A step sends the new tokens of its texts and waits at most ``timeout_s`` for the drafts. After a
timeout the drafter gets no requests until it answers a health check.
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
"""Most missing positions that the drafter computes while a step waits for the draft. A text that
lacks more is sent in a request of its own, and no step waits for the answer."""

FEED_TOKENS = 4096
"""Most positions of a long text that one request sends."""

FEED_BUDGET_S = 60.0
"""Budget of such a request, in seconds: the drafter computes it between other requests."""

MAX_SENT = 128
"""Long texts are sent only up to so many unanswered requests; the drafter refuses more than 256."""

PENDING_STATES = 32_768
"""Most hidden states kept until the drafter confirms them, of all requests together: those of a
few prefill steps. 448 MiB at a hidden size of 7168."""

BACKOFF_S = 1.0
"""Seconds until a text is sent again that the drafter had no room for or failed to compute."""

_READING_RATE = 0.1
"""Weight of a new measurement in the mean time per position."""


class DrafterClient:
    """Remote source: sends texts to a drafter and receives its drafts.

    A text of which the drafter lacks more than ``NEAR_TOKENS`` positions gets no draft before these
    are sent. With hidden states they are sent from the text's next step on, so that no step waits
    for the copy of a prompt's states. If states are missing, the drafter starts after the gap.
    """

    def __init__(self, config: DraftModelConfig | MtpConfig, context: SourceContext) -> None:
        self._config, self._kind = config, config.kind
        self._identity, self._metrics = context.model_identity, context.metrics
        hidden_size = context.hidden_size if config.NEEDS_STATES else 0
        wanted = Wanted(
            kind=config.kind,
            vocab_size=context.vocab_size,
            # An MTP module is a part of the target: `model.tokenizer` may have more tokens.
            tokenizer="" if config.NEEDS_STATES else context.tokenizer,
            hidden_size=hidden_size,
            replica=context.replica,
        )
        self._monitor = HealthMonitor(
            wanted,
            context.find_drafter(config),
            partial(context.metrics.set_reachable, config.kind),
        )
        self._link = DrafterLink(partial(context.metrics.count_error, config.kind))
        self._peer: Peer | None = None  # the last one connected to
        self._has_failed = False  # whether the last request for drafts failed
        self._has_own_gpu = config.num_gpus > 0 and config.placement == "actor"
        self._position_s = 0.0  # seconds to compute one position; 0: not measured yet
        num_slots = context.num_slots
        self._states = PendingStates(num_slots, PENDING_STATES) if config.NEEDS_STATES else None
        self._followed = FollowedTexts(num_slots, always=not config.dynamic)
        self._ended: deque[int] = deque(maxlen=MAX_ROWS)
        self._texts = DrafterTexts(num_slots)
        self._is_behind = np.zeros(num_slots, np.bool_)  # by slot: lacks more than NEAR_TOKENS
        self._are_behind = False  # whether any text is
        context.exits.append(self.end)

    def open(self, slot: int, controls: RequestControls) -> None:
        """See :meth:`specserve.sources.base.Source.open`."""
        wants = wants_drafts(controls, self._kind)
        self._texts.open(slot, self._salt_of(controls), is_wanted=wants)
        if wants and self._states is not None:
            self._followed.open(slot)

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        """Sends the new tokens of the texts and waits for the drafts with a limit above 0."""
        if self._link.sent:
            self._read_replies()  # a new connection would lose them
        peer, is_sent, slots = self._connect(), limits > 0, batch.slots
        if self._states is not None:
            reading = slots[self._texts.are_in_flight(slots)]
            self._followed.note(slots[is_sent], reading, is_there=peer is not None)
        if self._are_behind:
            is_sent |= self._is_behind[slots]
        if self._is_full or not self._config.dynamic:
            is_sent[:] = True
        if peer is None or not np.count_nonzero(is_sent):
            self._keep_states(batch)
            return
        is_sent &= self._texts.may_be_sent(slots)
        is_sent &= batch.num_tokens <= min(peer.max_tokens, MAX_TOKENS)
        (rows,) = is_sent.nonzero()
        # Before this step's states are added: their copy to the host has not finished yet.
        read, rows = self._rows_to_read(batch, rows)
        self._keep_states(batch)
        number, rows = self._ask(batch, rows, limits)
        for slot, row in read:  # one request each: a short text does not wait for a long one
            self._send(slot, [row], FEED_BUDGET_S, row.num_computed)
        if number and (answer := self._wait_for(number)) is not None:
            self._fill(drafts, slots[rows], answer, limits[rows])
            if np.count_nonzero(drafts.lengths[slots]):
                self._followed.answered()

    def reading_s(self, batch: DraftBatch) -> Float64Array:
        """Seconds that the drafter needs for the missing positions of each text before a draft.

        Counts as 0 if the drafter has its own GPU, as it does not slow the target down. Also
        counts as 0 if waiting would lose hidden states.

        Returns:
            float64 ``[n]``; 0: at most ``NEAR_TOKENS`` positions are missing; infinite: the text is
            in an unanswered request; NaN: the text cannot be sent now, or there is no drafter.
        """
        if self._link.sent:
            self._read_replies()
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
            seconds[self._texts.are_in_flight(slots)] = np.inf
        return seconds

    def are_followed(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: texts that are followed, see :class:`FollowedTexts`.

        If the source has no turn in a step, it loses the step's hidden states of these texts.
        """
        if self._states is None:
            return np.zeros(len(slots), np.bool_)
        return self._followed.which(slots)

    def follow_next(self) -> bool:
        """See :meth:`RemoteSource.follow_next`."""
        self._followed.follow_next()
        return self._states is not None

    def close(self, slots: Int64Array) -> None:
        """Reports the ended texts with the next request; at once if the drafter knows no others."""
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
        """Whether so many hidden states are pending that some may soon be dropped."""
        return self._states is not None and self._states.num_tokens > PENDING_STATES // 2

    def _salt_of(self, controls: RequestControls) -> int:
        """64 bits: requests with equal salts may share the cache of a common prefix."""
        if not controls.learn:
            return randbits(64)
        name = namespace(self._identity, controls.adapter, controls.tenant)
        salted = f"{name}\0{controls.cache_salt}"
        return int.from_bytes(blake2b(salted.encode(), digest_size=8).digest(), "little")

    def _connect(self) -> Peer | None:
        """Connects to the drafter of this step if it is new, and returns it; None: no drafter."""
        peer, known = self._monitor.peer, self._peer
        if peer is None or peer is known:
            return peer
        is_other = known is None or known.instance != peer.instance
        if known is None or is_other or known.connection != peer.connection:
            self._link.connect(peer.endpoint)
            self._give_up(math.inf)
        if is_other:
            self._position_s = 0.0  # its speed may differ
            self._texts.forget_all()
        self._peer = peer
        return peer

    def _keep_states(self, batch: DraftBatch) -> None:
        """Starts to copy this step's hidden states of the texts that are followed."""
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
        """First position that the drafter will compute of each text, and the end of the tokens
        that can be sent: int64 ``[r]``, ``[r]``.

        With hidden states, the input of position i is the state at i and the token at i + 1.
        """
        slots, begins = batch.slots[rows], self._texts.held[batch.slots[rows]]
        ends = batch.num_tokens[rows].astype(np.int64)
        if self._states is None:
            return begins, ends
        ends = np.minimum(self._states.ends[slots] + 1, ends)
        return np.maximum(begins, self._states.starts[slots]), ends

    def _rows_to_read(
        self, batch: DraftBatch, rows: Int64Array
    ) -> tuple[list[tuple[Int64Array, TextRow]], Int64Array]:
        """(Slot, row to send) of texts that lack more than ``NEAR_TOKENS``; the other ``rows``."""
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
        """Requests drafts for the rows that lack at most ``NEAR_TOKENS`` positions.

        Returns:
            (the request's number, 0: none was sent; its rows).
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
        most, ends = limits[rows], ends[is_asked]
        sent = self._texts.rows(batch, rows, ends, most, self._states, MAX_STATE_BYTES)
        rows = rows[: len(sent)]
        return self._send(batch.slots[rows], sent, self._config.timeout_s), rows

    def _send(
        self, slots: Int64Array, rows: Sequence[TextRow], budget_s: float, num_read: int = 0
    ) -> int:
        """Sends a request together with the ended texts; returns its number."""
        number = self._link.send(slots, rows, self._ended, budget_s, num_read)
        self._ended.clear()
        self._texts.send(slots, number)
        return number

    def _wait_for(self, number: int) -> DraftAnswer | None:
        """The answer to a request; None: refused, useless, or none came within ``timeout_s``."""
        for sent, reply in self._link.replies(time.monotonic() + self._config.timeout_s):
            fits = self._apply(sent, reply)
            if reply.number != number:
                continue
            if fits and isinstance(reply, DraftAnswer):
                self._has_failed = False
                self._monitor.reset()
                return reply
            if isinstance(reply, DraftAnswer) or reply.reason == "failed":
                if self._has_failed:
                    self._monitor.trip("its model fails or its answers are wrong; see its log")
                self._has_failed = True
            return None
        self._metrics.count_timeout(self._kind)
        self._monitor.trip(f"no answer within timeout_s ({self._config.timeout_s:g} s)")
        return None

    def _read_replies(self) -> None:
        """Reads the replies that have arrived and drops requests whose budget is long over."""
        for sent, reply in self._link.replies():
            self._apply(sent, reply)
        self._give_up(time.monotonic() - LOST_S)

    def _give_up(self, latest: float) -> None:
        for sent in self._link.give_up(latest):
            self._texts.settle(sent.slots, sent.number)

    def _apply(self, sent: Sent, reply: DraftAnswer | Refusal) -> bool:
        """Records what the drafter holds now; false: the reply does not match the request."""
        is_own = self._texts.settle(sent.slots, sent.number)
        slots = sent.slots[is_own]
        if isinstance(reply, Refusal):
            if reply.reason != "expired":
                self._metrics.count_error(self._kind)
            if reply.reason == "failed" and sent.num_read:
                self._texts.rest(slots, BACKOFF_S)
            return True
        if len(reply.rows) != len(sent.slots):
            self._metrics.count_error(self._kind)
            return False
        rows = list(compress(reply.rows, is_own))
        held = np.array([row.held for row in rows], np.int64)
        if sent.num_read and (held > self._texts.held[slots]).any():  # else nothing was computed
            weight = _READING_RATE if self._position_s else 1.0
            self._position_s += weight * (reply.compute_s / sent.num_read - self._position_s)
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if row.problem or row.begin or not row.held:
                self._note_problem(slot, row)
            if self._states is not None:
                self._states.confirm(slot, row.held)
        self._texts.held[slots] = held
        return True

    def _note_problem(self, slot: int, row: RowAnswer) -> None:
        """Records that the drafter holds only a part of a text, or nothing."""
        is_refused = self._texts.is_refused(slot, row)
        if self._texts.begins_partial(slot, row):
            self._metrics.count_partial_text(self._kind)
        if is_refused:  # its pending states would take the room of other texts
            self._texts.has_room[slot] = False
            if self._states is not None:
                self._states.drop(slot)
        if is_refused or row.problem:
            of_slot = np.array([slot])
            self._texts.rest(of_slot, math.inf if row.problem == "unfit" else BACKOFF_S)

    def _fill(
        self, drafts: Drafts, slots: Int64Array, answer: DraftAnswer, limits: Int32Array
    ) -> None:
        """Writes the answer's drafts for these slots, within the limits."""
        tokens: list[tuple[int, ...]] = []
        chances: list[bytes] = []
        for limit, row in zip(limits.tolist(), answer.rows, strict=True):
            is_good = len(row.tokens) == len(row.chances)
            if not is_good:
                self._metrics.count_error(self._kind)
            tokens.append(row.tokens[:limit] if is_good else ())
            chances.append(row.chances[:limit] if is_good else b"")
        lengths = np.array([len(each) for each in tokens])
        drafts.lengths[slots] = lengths
        rows, places = (np.arange(drafts.tokens.shape[1]) < lengths[:, None]).nonzero()
        drafts.tokens[slots[rows], places] = list(chain.from_iterable(tokens))
        drafts.confidence[slots[rows], places] = np.frombuffer(b"".join(chances), np.uint8) / 255
