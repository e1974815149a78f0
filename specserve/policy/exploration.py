"""One account, in seconds, for all that is done to learn from it alone."""

from __future__ import annotations

import numpy as np

from specserve.core.compile import lean_kernel
from specserve.core.types import Float64Array

EXPLORED_SHARE = 0.01
"""Share of the time that may be spent on learning whether what is not done would pay now."""

_MOST_SAVED = 4.0


class Exploration:
    """Earns ``EXPLORED_SHARE`` of the time of each step.

    Attributes:
        credit_s: float64 ``[1]``, for kernels. What is met first is learned first: there is much
            until something was earned.
    """

    def __init__(self) -> None:
        self.credit_s: Float64Array = np.full(1, np.inf)
        self.earn(1.0, 0)
        self.spend(0.0)  # compiles the kernels
        self.credit_s[:] = np.inf

    def earn(self, step_s: float, num_steps: int = 1) -> None:
        """Some steps of so many seconds each; four steps can be saved up for."""
        earn(self.credit_s, step_s, num_steps)

    def spend(self, price_s: float) -> bool:
        """Takes the price where there is enough; false: there is not."""
        return bool(spend(self.credit_s, price_s))


@lean_kernel
def earn(credit_s, step_s, num_steps):  # type: ignore[no-untyped-def]
    """See :meth:`Exploration.earn`."""
    earned_s = credit_s[0] + num_steps * EXPLORED_SHARE * step_s
    credit_s[0] = min(earned_s, _MOST_SAVED * step_s)


@lean_kernel
def spend(credit_s, price_s):  # type: ignore[no-untyped-def]
    """See :meth:`Exploration.spend`."""
    if price_s > credit_s[0]:
        return False
    credit_s[0] -= max(price_s, 0.0)
    return True
