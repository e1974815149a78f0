from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specserve.drafters.base import Row
from specserve.drafters.options import load
from tests.drafters.options import options_of

MODELS = Path(__file__).parents[2] / "configs/models"


@pytest.mark.parametrize("max_tokens", [2, 300])
@pytest.mark.parametrize(("kind", "model"), [("draft_model", "demo-draft"), ("mtp", "demo-base")])
def test_the_warm_up_of_load_leaves_no_text(kind: str, model: str, max_tokens: int) -> None:
    drafter = load(options_of(str(MODELS / model), kind, max_tokens))
    width = drafter.card.hidden_size
    row = Row(
        key=(b"a", 1),
        salt=0,
        start=0,
        tokens=np.arange(2, dtype=np.int32),
        states=np.zeros((1, width), np.uint16) if width else None,
    )
    (answer,) = drafter.draft([row])  # in the only slot
    assert answer.held == 2 - (width > 0)


def test_a_warm_up_that_hangs_ends_the_process() -> None:
    program = f"""
import io, sys, time
from specserve.drafters import options
sys.stderr = io.StringIO()
options.MAX_WARM_UP_S = 1
options._warm_up = lambda drafter: time.sleep(60)
options.load(options.{options_of(str(MODELS / "demo-draft"))!r})
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "Timeout (0:00:01)!" in ended.stderr
