"""Which texts' hidden states are kept for a drafter that continues them."""

from __future__ import annotations

import numpy as np

from specserve.core.types import BoolArray, Int64Array

FOLLOWED_STEPS, ASKED_STEPS, ANSWERED_STEPS = 256, 64, 16
"""Steps that a text is followed for while the source is not in use: before a draft of it is wanted;
after one was, since a text that is being read is soon asked for again; after the draft has come."""

_USE_RATE, _IN_USE = 0.1, 0.5
"""A source that was asked for drafts in half of the last ten steps or so is in use."""

_AWAY_RATE = 0.005
"""While there is no drafter it stays so for some hundred steps: most are soon back."""


class FollowedTexts:
    """Chooses the texts whose states are copied in a step; the states of others are lost.

    While the source is in use, or is always asked, all are followed that want drafts. Else those
    that were asked for last, and before a probe one text from its first step on: so there is a
    whole text to draft from. A source has a turn in each step as long as it follows a text.

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
        self._step = self._until = 0
        self._follows_next = True

    @property
    def are_all(self) -> bool:
        """Whether all texts are followed that want drafts."""
        return self._use >= _IN_USE or (self._always and self._is_there)

    def open(self, slot: int) -> None:
        """A text begins that wants drafts."""
        self._wants[slot] = True
        if self._is_there and self._follows_next and not self._chosen.any():
            self._choose(np.array([slot]), FOLLOWED_STEPS)

    def follow_next(self) -> None:
        """A probe is due: the next text that begins is followed, unless one is already."""
        self._follows_next = True

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
            self._choose(asked, ASKED_STEPS)
        elif self._step == self._until:
            self._chosen[:] = False

    def answered(self) -> None:
        """Drafts that were wanted in this step have come."""
        self._until = min(self._until, self._step + ANSWERED_STEPS)

    def which(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: those of these texts that are followed."""
        return (self._wants if self.are_all else self._chosen)[slots]

    def _choose(self, slots: Int64Array, num_steps: int) -> None:
        self._chosen[:] = False
        self._chosen[slots] = True
        self._until = self._step + num_steps
        self._follows_next = False
