"""Our hook in the benchmark ``drafting``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.peers.bench_drafting import application
from tests.peers.drafting_sides import Hook, Requests

MODEL = Path(__file__).parents[2] / "configs/models/demo-base"


def test_the_hook_drafts_what_followed_in_the_prompt() -> None:
    config = application(MODEL, dynamic=False)
    prompt = [*range(10, 20), 10, 11, 12]
    text = np.array([[*prompt, 13, 0]], np.int32)
    hook, requests = Hook(config, max_model_len=64), Requests(["a"], text, len(prompt))
    hook.begin(requests)
    requests.num_tokens_no_spec += 1
    ((*draft,),) = hook.step([[13]], [[]])()
    assert draft[:3] == [14, 15, 16]
