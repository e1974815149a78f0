"""Whether a model in another process is asked for drafts: the answer takes time.

A step that asks expects more tokens and takes longer. It asks where output tokens over time, both
as :mod:`specserve.proposers.gate` expects them, are more with the answer than without. Where there
is a draft already, it is replaced, or continued from its end, whichever promises more.

A text that the model has yet to read costs more than its drafts, and nobody knows how long it will
go on. So reading it is put off until drafts of it would have saved as much as it takes: then it
costs at most twice what knowing the end would have (the ski rental problem: Karlin et al.,
Competitive Snoopy Caching, 1988).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan
from typing import cast

import numpy as np

from specserve.core.types import Draft, Int32Array, Source
from specserve.proposers.acceptance import continuation
from specserve.proposers.gate import LEAST_GAIN, PROBE_SHARE, Gate, best_rate
from specserve.proposers.line import Line

logger = logging.getLogger(__name__)

MOST_CREDIT = 2.0
"""Probes that may be saved up for, in plain steps."""

HOPE = 0.9
"""Share of a draft that might be accepted: a request that is better off already is not probed."""

MOST_PAUSE = 256
"""Steps between two probes; it doubles with each that nothing came of."""

MOST_RETRIES = 8
"""Probes in a row of a text that is just being brought up to date and so got no draft."""

AWAY_S = 1e-3
"""A call without drafts that took less was none: the source is away, and knows it."""

REST_AFTER, MOST_REST = 4, 4
"""Thought about so often without being asked, it is thought about in each second step only; twice
as often, in each third, and so on. Other requests are thought about at once."""

_FIRST_SHARE, _ROW_SHARE = 0.2, 0.01
"""Cost of a call before any was measured, as shares of a plain step: of each token, of each row."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a source is asked for.

    Attributes:
        lengths: int32 ``[n]``, the longest draft of each request, 0: none; all 0: the source is not
            asked.
        continued: the drafts to continue, by the requests' rows.
    """

    lengths: Int32Array
    continued: dict[int, Draft] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Option:
    """A draft that a request might get.

    Attributes:
        held: chances of acceptance of what it continues; empty: it begins at the text's end.
        own: the same of its own tokens.
        room: its own tokens at most.
        continued: what it continues.
    """

    held: list[float]
    own: list[float]
    room: int
    continued: Draft | None = None

    @property
    def total(self) -> float:
        """Tokens that will be accepted, in the mean."""
        return sum(self.held) + sum(self.own)


class Inquiry:
    """Decides for one kind of source, step by step, which requests it is asked for.

    What is not asked cannot be learned from. So now and then one request is probed, if it could be
    better off than with the draft that it has: paid from an account that earns ``PROBE_SHARE`` of
    the time, and the more seldom the longer nothing came of it. Same calls, same answers: nothing
    is random.

    Args:
        kind: of the source; also what its drafts are called in ``gate.acceptance``.
        gate: what is known of acceptance and of steps.
        longest: its longest draft.
        is_serial: whether it takes a forward for each token that it continues, as for its own.
    """

    def __init__(self, kind: str, gate: Gate, longest: int, *, is_serial: bool = False) -> None:
        self._kind = cast(Source, kind)
        self._gate = gate
        self._longest = longest
        self._is_serial = is_serial
        self._credit = MOST_CREDIT
        self._pause, self._pause_left = 1, 0  # in steps
        self._retries_left = MOST_RETRIES
        self._is_probe = False
        self._num_unasked = self._rest_left = 0
        self._last_ids: tuple[str, ...] = ()
        self._cost: Line | None = None
        self._guesses: dict[tuple[int, bool], Draft] = {}
        self._missed: dict[str, float] = {}  # seconds that drafts would have saved a text

    def ask(
        self,
        request_ids: Sequence[str],
        limits: Int32Array,
        offers: Sequence[Sequence[Draft]],
        reading_s: Callable[[], Sequence[float]] = tuple,
    ) -> Asked:
        """What to ask for, for each request.

        Args:
            request_ids: n.
            limits: int32 ``[n]``, the longest draft that each can use, of all sources together.
            offers: n, the drafts that there are already, which cost nothing more.
            reading_s: tells n times what it takes to read what the source does not know of each
                text, in seconds; infinite: it is being read, NaN: there is no room for it; empty:
                nothing. Asked where there is something to decide.
        """
        self._credit = min(self._credit + PROBE_SHARE, MOST_CREDIT)
        self._pause_left = max(self._pause_left - 1, 0)
        self._is_probe = False
        none = Asked(np.zeros_like(limits))
        if not self._gate.may_draft(len(limits)):
            return none
        if not limits.any() or not self._gate.cost.is_calibrated(len(limits)):
            return Asked(np.minimum(limits, self._longest))
        ids, self._last_ids = self._last_ids, tuple(request_ids)
        if self._rest_left and ids == self._last_ids:
            self._rest_left -= 1
            return none
        self._num_unasked += 1
        asked = self._thought_about(request_ids, limits, offers, reading_s)
        if not asked.lengths.any():
            self._rest_left = min(self._num_unasked // REST_AFTER, MOST_REST)
        return asked

    def _thought_about(
        self,
        request_ids: Sequence[str],
        limits: Int32Array,
        offers: Sequence[Sequence[Draft]],
        reading_s: Callable[[], Sequence[float]],
    ) -> Asked:
        """What :meth:`ask` returns where there is something to decide."""
        offered = [self._best_of(*each) for each in zip(request_ids, offers, strict=True)]
        held = [gains for _, gains in offered]
        rooms = np.minimum(limits, self._longest)
        promising = {
            row: more
            for row, (most, room, (draft, gains)) in enumerate(
                zip(limits.tolist(), rooms.tolist(), offered, strict=True)
            )
            # No draft promises more tokens than it has.
            if (more := self._room_behind(most, draft, gains)) or room > sum(gains)
        }
        if not promising:
            return Asked(np.zeros_like(limits))
        times = reading_s() or [0.0] * len(limits)
        rows = [row for row in promising if not isnan(times[row])]
        options = {
            row: option
            for row in rows
            if isfinite(times[row])
            and (
                option := self._option(request_ids[row], rooms[row], promising[row], *offered[row])
            )
        }
        wanted, saved_s = self._best(held, options)
        lengths = self._worth_reading(request_ids, wanted, saved_s, times)
        ready = {row: each for row, each in options.items() if not times[row]}
        # Those that are read pay for a call of them alone, or wait for the others.
        lengths += self._best(held, ready)[0] if len(ready) < len(options) else wanted
        if wanted.any() or lengths.any():
            self._pause, self._num_unasked = 1, 0
            asked = np.flatnonzero(lengths).tolist()
            continued = {row: draft for row in asked if (draft := options[row].continued)}
            return Asked(lengths, continued)
        rows = [row for row in rows if HOPE * rooms[row] > sum(held[row])]
        return Asked(self._probe(rows, rooms, times))

    def _best_of(self, name: str, offers: Sequence[Draft]) -> tuple[Draft | None, list[float]]:
        """The draft that promises most, with its tokens' chances."""
        gains = self._gate.acceptance.gains
        judged = ((draft, gains(name, draft)) for draft in offers)
        return max(judged, key=lambda pair: sum(pair[1]), default=(None, []))

    def _room_behind(self, limit: int, draft: Draft | None, gains: list[float]) -> int:
        """How much can be added to a draft; 0 where its own end is unlikely to be reached."""
        if draft is None or len(gains) < len(draft.tokens):
            return 0
        return max(0, min(limit - len(draft.tokens), self._longest))

    def _option(
        self, name: str, room: int, room_behind: int, draft: Draft | None, held: list[float]
    ) -> _Option | None:
        """The draft that would promise most, new or behind ``draft``; None: none promises more."""
        gains = self._gate.acceptance.gains
        best = _Option([], gains(name, self._guess(room)), room)
        if room_behind:
            chances = gains(name, self._guess(room_behind, is_continuation=True))
            behind = _Option(held, [held[-1] * each for each in chances], room_behind, draft)
            best = max(best, behind, key=lambda option: option.total)
        return best if best.total > sum(held) else None

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is kept of these requests."""
        for request_id in request_ids:
            self._missed.pop(request_id, None)

    def _best(
        self, held: list[list[float]], options: Mapping[int, _Option]
    ) -> tuple[Int32Array, float]:
        """The lengths that bring most output tokens for their time, and the seconds saved by them.

        All 0: none brings more than there would be without.

        Args:
            held: n times the chances of acceptance of the draft that there is.
            options: drafts that promise more, by row; may be none.
        """
        asked = np.zeros(len(held), np.int32)
        if not options:
            return asked, 0.0
        plain, base, per_token = self._gate.cost.at(len(held))
        base, per_token = base / plain, per_token / plain
        without = max(self._rate(held, base, per_token), float(len(held)))
        best = without * (1 + LEAST_GAIN)
        for num_steps in _lengths(max(map(self._num_steps, options.values()))):
            lengths = {row: self._num_own(each, num_steps) for row, each in options.items()}
            cut = {row: each.held + each.own[: lengths[row]] for row, each in options.items()}
            wanted = {row: each for row, each in cut.items() if sum(each) > sum(held[row])}
            if not wanted:
                continue
            price = self._price(len(wanted), num_steps, plain)
            merged = [wanted.get(row, each) for row, each in enumerate(held)]
            rate = self._rate(merged, base + price, per_token)
            logger.debug(
                "%s: %d requests, %d steps: %.3f a plain step with, %.3f without, call %.3f",
                *(self._kind, len(wanted), num_steps, rate, without, price),
            )
            if rate > best:
                best, asked = rate, np.zeros(len(held), np.int32)
                for row in wanted:
                    asked[row] = min(lengths[row], options[row].room)
        return asked, (1 - without / best) * plain

    def _num_steps(self, option: _Option) -> int:
        """Forwards that a draft takes."""
        return len(option.own) + len(option.held) * self._is_serial

    def _num_own(self, option: _Option, num_steps: int) -> int:
        """A draft's own tokens, of so many forwards."""
        return max(0, num_steps - len(option.held) * self._is_serial)

    def _worth_reading(
        self,
        request_ids: Sequence[str],
        wanted: Int32Array,
        saved_s: float,
        reading_s: Sequence[float],
    ) -> Int32Array:
        """Of texts that are yet to be read, those whose drafts would have saved that time by now.

        Args:
            request_ids: n.
            wanted: int32 ``[n]``, lengths to ask for if all texts were read.
            saved_s: seconds that asking for them would save, of a plain step.
            reading_s: see :meth:`ask`.

        Returns:
            int32 ``[n]``.
        """
        worth = np.zeros_like(wanted)
        rows = np.flatnonzero(wanted).tolist()
        for row in rows:
            if reading_s[row]:
                missed_s = self._missed.get(request_ids[row], 0.0) + saved_s / len(rows)
                self._missed[request_ids[row]] = missed_s
                if missed_s >= reading_s[row]:
                    worth[row] = wanted[row]
        return worth

    def observe_call(
        self,
        request_ids: Sequence[str],
        asked: Asked,
        drafts: Sequence[Draft],
        seconds: float,
    ) -> None:
        """What a call took.

        Args:
            request_ids: n.
            asked: what was asked for.
            drafts: n, the answer.
            seconds: its duration.
        """
        for request_id, draft in zip(request_ids, drafts, strict=True):
            if draft.tokens:
                self._missed.pop(request_id, None)  # it was read; to be read again it has to earn
        lengths = asked.lengths
        if self._cost is None or not lengths.any():
            return
        is_answered = any(draft.tokens for draft in drafts)
        # Texts that it has yet to read are asked for too, and nobody waits for those.
        num_rows = sum(bool(draft.tokens) for draft in drafts) or int(np.count_nonzero(lengths))
        if self._is_probe:
            self._note_probe(is_answered)
        if seconds < AWAY_S and not is_answered:
            return
        num_steps = int(lengths.max())
        if self._is_serial and asked.continued:
            behind = (lengths[row] + len(each.tokens) for row, each in asked.continued.items())
            num_steps = max(num_steps, *map(int, behind))
        self._cost.add((1.0, num_rows, num_steps), seconds)

    def _rate(self, gains: Sequence[Sequence[float]], base: float, per_token: float) -> float:
        """Output tokens in a plain step's time, with these drafts cut to the best length."""
        falling = sorted((gain for row in gains for gain in row), reverse=True)
        return best_rate(falling, len(gains), base, per_token)[0]

    def _price(self, num_rows: int, length: int, plain: float) -> float:
        """Of a call, in plain steps."""
        if self._cost is None:
            share = np.array([0.0, _ROW_SHARE, _FIRST_SHARE]) * plain
            self._cost = Line(share, np.array([0.1, 1.0, 0.1]))
        pairs = zip(self._cost.coefficients, (1.0, num_rows, length), strict=True)
        return max(sum(a * b for a, b in pairs), 0.0) / plain

    def _guess(self, length: int, *, is_continuation: bool = False) -> Draft:
        """A draft of this source, of which only the length is known; always the same one."""
        guess = self._guesses.get((length, is_continuation))
        if guess is None:
            guess = (continuation if is_continuation else Draft)((0,) * length, self._kind)
            self._guesses[length, is_continuation] = guess
        return guess

    def _probe(
        self, rows: Sequence[int], rooms: Int32Array, reading_s: Sequence[float]
    ) -> Int32Array:
        """Asks for the first of these rows, when it is time and there is credit; else for none.

        The first one is the same request for as long as it runs: the source has to be brought up
        to date on no more than one text.
        """
        asked = np.zeros_like(rooms)
        if not rows or self._pause_left or not isfinite(reading_s[rows[0]]):
            return asked
        plain, _, _ = self._gate.cost.at(len(rooms))
        price = self._price(1, int(rooms[rows[0]]), plain)
        if price > self._credit:
            return asked
        self._credit -= price
        self._is_probe = True
        asked[rows[0]] = rooms[rows[0]]
        return asked

    def _note_probe(self, is_answered: bool) -> None:
        """A text that is just being brought up to date gets no draft: it is asked for again."""
        if not is_answered and self._retries_left:
            self._retries_left -= 1
            return
        self._retries_left = MOST_RETRIES
        self._pause = min(2 * self._pause, MOST_PAUSE)
        self._pause_left = self._pause


def _lengths(longest: int) -> list[int]:
    """1, 2, 4, .. and the longest."""
    return sorted({longest, *(1 << i for i in range(longest.bit_length()) if 1 << i < longest)})
