"""Chooses the texts whose hidden states are kept for a drafter that needs them."""

from __future__ import annotations

import numpy as np

from specserve.core.types import BoolArray, Int64Array

FOLLOWED_STEPS, ASKED_STEPS, ANSWERED_STEPS = 256, 64, 16
"""Steps for which a text is followed while the source is not in use: from its first step; after a
draft was requested (the request is soon repeated while the drafter reads); after a draft came."""

_USE_RATE, _IN_USE = 0.1, 0.5
"""Weight of a step in the mean use, and the mean from which a source is in use: about half of the
last ten steps requested drafts."""

_AWAY_RATE = 0.005
"""Weight while there is no drafter. The mean lasts some hundred steps, a usual outage."""


class FollowedTexts:
    """Chooses the texts whose hidden states are copied in a step; those of other texts are lost.

    All texts that want drafts are followed while the source is in use or is always asked. Otherwise
    these are the texts of the last request for drafts. Before a probe it is the next text that
    begins, so that the drafter gets all of its states. While any text is followed, the source has
    a turn in each step.

    Args:
        num_slots: most texts at a time.
        always: whether the source is asked in each step.
    """

    def __init__(self, num_slots: int, *, always: bool) -> None:
        self._always = always
        self._is_there = False
        self._use = 0.0
        self._wants = np.zeros(num_slots, np.bool_)
        self._chosen = np.zeros(num_slots, np.bool_)
        self._step = self._until = 0
        self._follows_next = True

    @property
    def are_all(self) -> bool:
        """Whether all texts that want drafts are followed."""
        return self._use >= _IN_USE or (self._always and self._is_there)

    def open(self, slot: int) -> None:
        """Registers a new text that wants drafts."""
        self._wants[slot] = True
        if self._is_there and self._follows_next and not self._chosen.any():
            self._choose(np.array([slot]), FOLLOWED_STEPS)
            self._follows_next = False

    def follow_next(self) -> None:
        """Follows the next text that begins, for a probe; not while other texts are followed."""
        self._follows_next = True

    def close(self, slots: Int64Array) -> None:
        """Removes texts that have ended."""
        self._wants[slots] = self._chosen[slots] = False

    def note(self, asked: Int64Array, reading: Int64Array, *, is_there: bool) -> None:
        """Records a step.

        Args:
            asked: int64 ``[m]``, slots of the texts for which a draft is requested.
            reading: int64 ``[r]``, slots of the texts that the drafter is reading. They stay
                followed, since the drafter would have read them for nothing.
            is_there: whether there is a drafter to ask.
        """
        self._step += 1
        self._is_there = is_there
        is_used = is_there and len(asked) > 0
        self._use += (_USE_RATE if is_there else _AWAY_RATE) * (is_used - self._use)
        read = reading[self._chosen[reading]]
        if is_used:
            self._choose(np.concatenate([asked, read]), ASKED_STEPS)
            self._follows_next = False
        elif self._step == self._until:
            self._choose(read, ANSWERED_STEPS)

    def answered(self) -> None:
        """Records that drafts requested in this step have come."""
        self._until = min(self._until, self._step + ANSWERED_STEPS)

    def which(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: which of these texts are followed."""
        return (self._wants if self.are_all else self._chosen)[slots]

    def _choose(self, slots: Int64Array, num_steps: int) -> None:
        self._chosen[:] = False
        self._chosen[slots] = True
        self._until = self._step + num_steps
