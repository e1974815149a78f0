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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan
from typing import Self

import numpy as np

from specserve.core.types import Draft, Int32Array
from specserve.proposers.gate import LEAST_GAIN, PROBE_SHARE, Gate, best_rate
from specserve.proposers.line import Line
from specserve.proposers.prospects import Prospect, Prospects

logger = logging.getLogger(__name__)

MOST_CREDIT = 2.0
"""Probes that may be saved up for, in plain steps."""

HOPE = 0.9
"""Share of a draft that might be accepted: a request that is better off already is not probed."""

LEAST_HELD = 0.5
"""Chance of a draft's last token: one whose end is less likely to be reached is not continued only
to learn from it."""

PROBE_BEHIND_EVERY = 32
"""Of the steps that ask, each such one has a request's draft continued instead of replaced, to know
what that is worth."""

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


_Wishes = dict[int, tuple[int, Draft | None]]
"""By row: how many tokens to ask for, and behind which draft; None: behind the text."""


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

    @classmethod
    def of(cls, num_requests: int, wishes: _Wishes) -> Self:
        """What is wished for by row."""
        lengths = np.zeros(num_requests, np.int32)
        for row, (length, _) in wishes.items():
            lengths[row] = length
        return cls(lengths, {row: draft for row, (_, draft) in wishes.items() if draft})


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
        self._kind = kind
        self._gate = gate
        self._longest = longest
        self._prospects = Prospects(kind, gate.acceptance, longest, is_serial)
        self._credit = MOST_CREDIT
        self._pause, self._pause_left = 1, 0  # in steps
        self._retries_left = MOST_RETRIES
        self._is_probe = False
        self._num_probes = 0  # and turns that were passed on
        self._num_asked = self._num_unasked = self._rest_left = 0
        self._last_ids: tuple[str, ...] = ()
        self._cost: Line | None = None
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
        prospects = self._prospects
        drafts = [prospects.best(*each) for each in zip(request_ids, offers, strict=True)]
        held = [gains for _, gains in drafts]
        rooms = np.minimum(limits, self._longest).tolist()
        behind = [
            prospects.room_behind(limit, *draft)
            for limit, draft in zip(limits.tolist(), drafts, strict=True)
        ]
        # No draft promises more tokens than it has.
        rows = [row for row, room in enumerate(rooms) if room > sum(held[row]) or behind[row]]
        if not any(rooms[row] > sum(held[row]) for row in rows):
            most = sum(held[row][-1] * behind[row] for row in rows)
            if most <= LEAST_GAIN * (len(held) + sum(map(sum, held))):
                return Asked(np.zeros_like(limits))
        times = reading_s() or [0.0] * len(limits)
        rows = [row for row in rows if not isnan(times[row])]
        found = {
            row: prospects.of(request_ids[row], rooms[row], behind[row], *drafts[row])
            for row in rows
            if isfinite(times[row])
        }
        found = {row: each for row, each in found.items() if each}
        wanted, saved_s = self._best(held, found)
        worth = self._worth_reading(request_ids, wanted, saved_s, times)
        ready = {row: each for row, each in found.items() if not times[row]}
        # Those that are read pay for a call of them alone, or wait for the others.
        asked = self._best(held, ready)[0] if len(ready) < len(found) else wanted
        if wanted or asked:
            self._pause, self._num_unasked = 1, 0
            self._num_asked += 1
            if self._num_asked % PROBE_BEHIND_EVERY == 0:
                self._continue_one(asked, behind, drafts)
            return Asked.of(len(limits), {**worth, **asked})
        return Asked.of(len(limits), self._probe(rows, rooms, behind, drafts, times))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is kept of these requests."""
        for request_id in request_ids:
            self._missed.pop(request_id, None)

    def _best(
        self, held: list[list[float]], prospects: Mapping[int, Sequence[Prospect]]
    ) -> tuple[_Wishes, float]:
        """What brings most output tokens for its time, and the seconds saved by it.

        Nothing: nothing brings more than there would be without.

        Args:
            held: n times the chances of acceptance of the draft that there is.
            prospects: by row, at least one each; may be none.
        """
        if not prospects:
            return {}, 0.0
        plain, base, per_token = self._gate.cost.at(len(held))
        base, per_token = base / plain, per_token / plain
        without = max(self._rate(held, base, per_token), float(len(held)))
        best, wishes = without * (1 + LEAST_GAIN), _Wishes()
        for num_forwards in _numbers_of_forwards(prospects.values()):
            chosen = {
                row: max(each, key=lambda one: sum(one.chances(num_forwards)))
                for row, each in prospects.items()
            }
            cut = {row: each.chances(num_forwards) for row, each in chosen.items()}
            wanted = {row: each for row, each in cut.items() if sum(each) > sum(held[row])}
            if not wanted:
                continue
            price = self._price(len(wanted), num_forwards, plain)
            merged = [wanted.get(row, each) for row, each in enumerate(held)]
            rate = self._rate(merged, base + price, per_token)
            logger.debug(
                "%s: %d requests, %d forwards: %.3f a plain step with, %.3f without, call %.3f",
                *(self._kind, len(wanted), num_forwards, rate, without, price),
            )
            if rate > best:
                best = rate
                wishes = {
                    row: (chosen[row].num_own(num_forwards), chosen[row].continued)
                    for row in wanted
                }
        return wishes, (1 - without / best) * plain if wishes else 0.0

    def _worth_reading(
        self,
        request_ids: Sequence[str],
        wanted: _Wishes,
        saved_s: float,
        reading_s: Sequence[float],
    ) -> _Wishes:
        """Of texts that are yet to be read, those whose drafts would have saved that time by now.

        Args:
            request_ids: n.
            wanted: what to ask for if all texts were read.
            saved_s: seconds that asking for it would save, of a plain step.
            reading_s: see :meth:`ask`.
        """
        worth = _Wishes()
        for row, wish in wanted.items():
            if reading_s[row]:
                missed_s = self._missed.get(request_ids[row], 0.0) + saved_s / len(wanted)
                self._missed[request_ids[row]] = missed_s
                if missed_s >= reading_s[row]:
                    worth[row] = wish
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
        # Texts that it has yet to read are asked for too, and nobody waits for those.
        answered = [row for row, draft in enumerate(drafts) if draft.tokens]
        is_answered = bool(answered)
        if self._is_probe:
            self._note_probe(is_answered)
        if seconds < AWAY_S and not is_answered:
            return
        rows = answered or np.flatnonzero(lengths).tolist()
        num_forwards = lengths[rows].tolist()
        for index, row in enumerate(rows):
            if (continued := asked.continued.get(row)) is not None:
                num_forwards[index] += self._prospects.num_before(continued)
        self._cost.add((1.0, len(rows), max(num_forwards)), seconds)

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

    def _probe(
        self,
        rows: Sequence[int],
        rooms: Sequence[int],
        behind: Sequence[int],
        drafts: Sequence[tuple[Draft | None, list[float]]],
        reading_s: Sequence[float],
    ) -> _Wishes:
        """Asks for the first of these rows that may gain by it, if it is time and there is credit.

        That is the same request for as long as it runs: the source has to be brought up to date on
        no more than one text. Where its draft may be replaced or continued, both have their turns.
        """
        if self._pause_left:
            return {}
        for row in rows:
            draft, held = drafts[row]
            is_new = HOPE * rooms[row] > sum(held)
            is_behind = _may_be_continued_to_learn(behind[row], held)
            if is_new or is_behind:
                break
        else:
            return {}
        if not isfinite(reading_s[row]):
            return {}
        choices = [(rooms[row], None)] * is_new + [(behind[row], draft)] * is_behind
        length, continued = choices[self._num_probes % len(choices)]
        num_before = self._prospects.num_before(continued) if continued else 0
        plain, _, _ = self._gate.cost.at(len(drafts))
        price = self._price(1, num_before + length, plain)
        self._num_probes += price <= self._credit or price > MOST_CREDIT
        if price > self._credit:
            return {}
        self._credit -= price
        self._is_probe = True
        return {row: (length, continued)}

    @staticmethod
    def _continue_one(
        wishes: _Wishes,
        behind: Sequence[int],
        drafts: Sequence[tuple[Draft | None, list[float]]],
    ) -> None:
        """Has the first draft continued that may be, and was to be replaced."""
        for row, (_, continued) in wishes.items():
            draft, held = drafts[row]
            if continued is None and _may_be_continued_to_learn(behind[row], held):
                wishes[row] = behind[row], draft
                return

    def _note_probe(self, is_answered: bool) -> None:
        """A text that is just being brought up to date gets no draft: it is asked for again."""
        if not is_answered and self._retries_left:
            self._retries_left -= 1
            return
        self._retries_left = MOST_RETRIES
        self._pause = min(2 * self._pause, MOST_PAUSE)
        self._pause_left = self._pause


def _may_be_continued_to_learn(room_behind: int, held: Sequence[float]) -> bool:
    """Of a draft with these chances; there is room behind one alone, which has tokens."""
    return room_behind > 0 and held[-1] > LEAST_HELD


def _numbers_of_forwards(prospects: Iterable[Sequence[Prospect]]) -> list[int]:
    """Such that each prospect has 1, 2, 4, .. or all of its own tokens."""
    shapes = {(one.num_before, len(one.own)) for each in prospects for one in each}
    return sorted({before + length for before, own in shapes for length in _lengths(own)})


def _lengths(longest: int) -> list[int]:
    """1, 2, 4, .. and the longest."""
    return sorted({longest, *(1 << i for i in range(longest.bit_length()) if 1 << i < longest)})
