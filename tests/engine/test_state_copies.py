"""Copies of a step's hidden states."""

from __future__ import annotations

import numpy as np
import torch

from specserve.engine.state_copies import copy_states


def test_only_the_states_of_the_given_rows_are_copied() -> None:
    hidden = torch.arange(12.0).reshape(6, 2)
    copied = copy_states(hidden, np.array([2, 3, 1], np.int32), np.array([2, 0]))()
    rows = torch.from_numpy(copied.astype(np.int32)).to(torch.int16).view(torch.bfloat16)
    assert rows.tolist() == [[10, 11], [0, 1], [2, 3]]
