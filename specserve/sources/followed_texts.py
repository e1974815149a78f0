"""Which texts' hidden states are kept for a drafter that continues them."""

from __future__ import annotations

import numpy as np

from specserve.core.backoff import Backoff
from specserve.core.types import BoolArray, Int64Array

FOLLOWED_STEPS = 256
"""Steps that a text is followed for without a draft of it being wanted, while the source is not in
use: probes are more frequent where something comes of them."""

_USE_RATE, _IN_USE = 0.1, 0.5
"""A source that was asked for drafts in half of the last ten steps or so is in use."""

_AWAY_RATE = 0.005
"""While there is no drafter it stays so for some hundred steps: most are soon back."""


class FollowedTexts:
    """Chooses the texts whose states are copied in a step; the states of others are lost.

    While the source is in use, or is always asked, all are followed that want drafts. Else those
    that were asked for last, and where there are none one text from its first step on: a probe
    of it has a whole text to draft from.

    Args:
        num_slots: texts at a time.
        always: whether the source is asked in each step.
    """

    def __init__(self, num_slots: int, *, always: bool) -> None:
        self._always = always
        self._is_there = False
        self._use = 0.0
        self._wants = np.zeros(num_slots, np.bool_)
        self._chosen = np.zeros(num_slots, np.bool_)
        self._step = self._chosen_at = 0
        self._next = Backoff(FOLLOWED_STEPS, 64 * FOLLOWED_STEPS)

    @property
    def are_all(self) -> bool:
        """Whether all texts are followed that want drafts."""
        return self._use >= _IN_USE or (self._always and self._is_there)

    def open(self, slot: int) -> None:
        """A text begins that wants drafts."""
        self._wants[slot] = True
        if self._is_there and self._next.is_due(self._step) and not self._chosen.any():
            self._choose(np.array([slot]))

    def close(self, slots: Int64Array) -> None:
        """These texts have ended."""
        self._wants[slots] = self._chosen[slots] = False

    def note(self, asked: Int64Array, *, is_there: bool) -> None:
        """Takes note of a step.

        Args:
            asked: int64 ``[m]``, slots of the texts that a draft is wanted of.
            is_there: whether there is a drafter to ask.
        """
        self._step += 1
        self._is_there = is_there
        is_used = is_there and len(asked) > 0
        self._use += (_USE_RATE if is_there else _AWAY_RATE) * (is_used - self._use)
        if is_used:
            self._next.reset()
            self._choose(asked)
        elif self._step - self._chosen_at == FOLLOWED_STEPS:
            self._chosen[:] = False
            self._next.fail(self._step)

    def which(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: those of these texts that are followed."""
        return (self._wants if self.are_all else self._chosen)[slots]

    def _choose(self, slots: Int64Array) -> None:
        self._chosen[:] = False
        self._chosen[slots] = True
        self._chosen_at = self._step
