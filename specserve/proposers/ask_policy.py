"""Whether a model in another process is asked for drafts: the answer takes time.

A step that asks expects more tokens and takes longer. It asks where output tokens over time, both
as :mod:`specserve.proposers.gate` expects them, are more with the answer than without.

A text that the model has yet to read costs more than its drafts, and nobody knows how long it will
go on. So reading it is put off until drafts of it would have saved as much as it takes: then it
costs at most twice what knowing the end would have (the ski rental problem: Karlin et al.,
Competitive Snoopy Caching, 1988).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import isfinite, isnan

import numpy as np

from specserve.core.types import Draft, Int32Array
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


class AskPolicy:
    """Decides for one kind of source, step by step, which requests it is asked for.

    What is not asked cannot be learned from. So now and then one request is probed, if it could be
    better off than with the draft that it has: paid from an account that earns ``PROBE_SHARE`` of
    the time, and the more seldom the longer nothing came of it. Same calls, same answers: nothing
    is random.

    Args:
        kind: of the source; also what its drafts are called in ``gate.acceptance``.
        gate: what is known of acceptance and of steps.
    """

    def __init__(self, kind: str, gate: Gate) -> None:
        self._kind = kind
        self._gate = gate
        self._credit = MOST_CREDIT
        self._pause, self._pause_left = 1, 0  # in steps
        self._retries_left = MOST_RETRIES
        self._is_probe = False
        self._num_unasked = self._rest_left = 0
        self._last_ids: tuple[str, ...] = ()
        self._cost: Line | None = None
        self._guesses: dict[int, Draft] = {}
        self._missed: dict[str, float] = {}  # seconds that drafts would have saved a text

    def limits(
        self,
        request_ids: Sequence[str],
        limits: Int32Array,
        offers: Sequence[Sequence[Draft]],
        reading_s: Callable[[], Sequence[float]] = tuple,
    ) -> Int32Array:
        """How long a draft to ask for, for each request.

        Args:
            request_ids: n.
            limits: int32 ``[n]``, the longest draft that each can use.
            offers: n, the drafts that there are already, which cost nothing more.
            reading_s: tells n times what it takes to read what the source does not know of each
                text, in seconds; infinite: it is being read, NaN: there is no room for it; empty:
                nothing. Asked where there is something to decide.

        Returns:
            int32 ``[n]``, 0: none; all 0: the source is not asked.
        """
        self._credit = min(self._credit + PROBE_SHARE, MOST_CREDIT)
        self._pause_left = max(self._pause_left - 1, 0)
        self._is_probe = False
        if not self._gate.may_draft(len(limits)):
            return np.zeros_like(limits)
        if not limits.any() or not self._gate.cost.is_calibrated(len(limits)):
            return limits
        ids, self._last_ids = self._last_ids, tuple(request_ids)
        if self._rest_left and ids == self._last_ids:
            self._rest_left -= 1
            return np.zeros_like(limits)
        self._num_unasked += 1
        asked = self._thought_about(request_ids, limits, offers, reading_s)
        if not asked.any():
            self._rest_left = min(self._num_unasked // REST_AFTER, MOST_REST)
        return asked

    def _thought_about(
        self,
        request_ids: Sequence[str],
        limits: Int32Array,
        offers: Sequence[Sequence[Draft]],
        reading_s: Callable[[], Sequence[float]],
    ) -> Int32Array:
        """What :meth:`limits` returns where there is something to decide."""
        acceptance = self._gate.acceptance
        held = [
            max(
                (acceptance.prefix_probabilities(name, draft) for draft in each),
                key=sum,
                default=[],
            )
            for name, each in zip(request_ids, offers, strict=True)
        ]
        longest = limits.tolist()
        # No draft promises more tokens than it has.
        rows = [row for row, most in enumerate(longest) if most > sum(held[row])]
        if not rows:
            return np.zeros_like(limits)
        times = reading_s() or [0.0] * len(limits)
        rows = [row for row in rows if not isnan(times[row])]
        gains = {
            row: acceptance.prefix_probabilities(request_ids[row], self._guess(longest[row]))
            for row in rows
            if isfinite(times[row])
        }
        gains = {row: each for row, each in gains.items() if sum(each) > sum(held[row])}
        wanted, saved_s = self._best(held, gains, limits)
        asked = self._worth_reading(request_ids, wanted, saved_s, times)
        ready = {row: each for row, each in gains.items() if not times[row]}
        # Those that are read pay for a call of them alone, or wait for the others.
        asked += self._best(held, ready, limits)[0] if len(ready) < len(gains) else wanted
        if wanted.any() or asked.any():
            self._pause, self._num_unasked = 1, 0
            return asked
        rows = [row for row in rows if HOPE * longest[row] > sum(held[row])]
        return self._probe(rows, limits, times)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is kept of these requests."""
        for request_id in request_ids:
            self._missed.pop(request_id, None)

    def _best(
        self, held: list[list[float]], gains: dict[int, list[float]], limits: Int32Array
    ) -> tuple[Int32Array, float]:
        """The lengths that bring most output tokens for their time, and the seconds saved by them.

        All 0: none brings more than there would be without.

        Args:
            held: chances of acceptance of the drafts that there are.
            gains: the same of a new draft, for the rows where it promises more; may be none.
            limits: see :meth:`limits`.
        """
        if not gains:
            return np.zeros_like(limits), 0.0
        plain, base, per_token = self._gate.cost.at(len(held))
        base, per_token = base / plain, per_token / plain
        without = max(self._rate(held, base, per_token), float(len(held)))
        best, asked = without * (1 + LEAST_GAIN), np.zeros_like(limits)
        for length in _lengths(max(map(len, gains.values()))):
            cut = {row: each[:length] for row, each in gains.items()}
            wanted = {row: each for row, each in cut.items() if sum(each) > sum(held[row])}
            if not wanted:
                continue
            price = self._price(len(wanted), length, plain)
            merged = [wanted.get(row, each) for row, each in enumerate(held)]
            rate = self._rate(merged, base + price, per_token)
            logger.debug(
                "%s: %d requests, %d tokens: %.3f a plain step with, %.3f without, call %.3f",
                *(self._kind, len(wanted), length, rate, without, price),
            )
            if rate > best:
                best, asked = rate, np.zeros_like(limits)
                rows = list(wanted)
                asked[rows] = np.minimum(limits[rows], length)
        return asked, (1 - without / best) * plain

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
            reading_s: see :meth:`limits`.

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
        limits: Int32Array,
        drafts: Sequence[Draft],
        seconds: float,
    ) -> None:
        """What a call took.

        Args:
            request_ids: n.
            limits: int32 ``[n]``, what was asked for.
            drafts: n, the answer.
            seconds: its duration.
        """
        for request_id, draft in zip(request_ids, drafts, strict=True):
            if draft.tokens:
                self._missed.pop(request_id, None)  # it was read; to be read again it has to earn
        if self._cost is None or not limits.any():
            return
        # Texts that it has yet to read are asked for too, and nobody waits for those.
        answered = [row for row, draft in enumerate(drafts) if draft.tokens]
        is_answered = bool(answered)
        if self._is_probe:
            self._note_probe(is_answered)
        if seconds < AWAY_S and not is_answered:
            return
        rows = answered or np.flatnonzero(limits).tolist()
        self._cost.add((1.0, len(rows), int(limits[rows].max())), seconds)

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

    def _guess(self, length: int) -> Draft:
        """A draft of this source, of which only the length is known; always the same one."""
        if length not in self._guesses:
            self._guesses[length] = Draft((0,) * length, self._kind)
        return self._guesses[length]

    def _probe(
        self, rows: Sequence[int], limits: Int32Array, reading_s: Sequence[float]
    ) -> Int32Array:
        """Asks for the first of these rows, when it is time and there is credit; else for none.

        The first one is the same request for as long as it runs: the source has to be brought up
        to date on no more than one text.
        """
        asked = np.zeros_like(limits)
        if not rows or self._pause_left or not isfinite(reading_s[rows[0]]):
            return asked
        plain, _, _ = self._gate.cost.at(len(limits))
        price = self._price(1, int(limits[rows[0]]), plain)
        if price > self._credit:
            return asked
        self._credit -= price
        self._is_probe = True
        asked[rows[0]] = limits[rows[0]]
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
