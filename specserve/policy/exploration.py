"""One account, in seconds, for all that is done to learn from it alone: float64 ``[1]``.

It begins with as much as can be saved up: what is met first is learned first.
"""

from __future__ import annotations

from specserve.core.compile import lean_kernel

EXPLORED_SHARE = 0.01
"""Share of the time that may be spent on learning whether what is not done would pay now."""

_MOST_SAVED = 4.0
_ENOUGH = 2.0


@lean_kernel
def earn(credit_s, step_s, num_steps):  # type: ignore[no-untyped-def]
    """Some steps of so many seconds each; four steps can be saved up for."""
    earned_s = credit_s[0] + num_steps * EXPLORED_SHARE * step_s
    credit_s[0] = min(earned_s, _MOST_SAVED * step_s)


@lean_kernel
def spend(credit_s, price_s, step_s):  # type: ignore[no-untyped-def]
    """Takes the price where there is enough, or two steps are saved; false: there is not.

    What is missing is owed. So what is believed to be dearer than can be saved is tried, too: it is
    seldom, and whether it still is so dear is learned by nothing else.
    """
    if credit_s[0] < min(price_s, _ENOUGH * step_s):
        return False
    credit_s[0] -= max(price_s, 0.0)
    return True
