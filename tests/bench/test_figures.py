from __future__ import annotations

import pytest

from specserve.bench.figures import figures
from specserve.engine.generation import Completion, RunResult


def completion(*token_seconds: float) -> Completion:
    return Completion(
        text="",
        token_ids=tuple(range(len(token_seconds))),
        finish_reason="length",
        seconds=token_seconds[-1],
        token_seconds=token_seconds,
    )


def test_the_time_of_a_step_is_divided_by_its_tokens() -> None:
    # Steps after the first token: 0.3 s for three tokens, then 0.2 s for one.
    done = (completion(0.1, 0.4, 0.4, 0.4, 0.6), completion(0.5))
    result = RunResult(completions=done, seconds=2.0, drafts=())
    found = figures(result, [30, 10], num_devices=4)
    assert found["request_num"] == 2
    assert found["average_input_length"] == 20
    assert found["average_output_length"] == 3
    assert found["latency_for_all"] == 2.0
    assert found["latency_for_per_infer"] == pytest.approx(0.55)
    assert found["lpct"] == pytest.approx(600 / 40)
    assert found["lpot_p50"] == pytest.approx(100)
    assert found["lpot_max"] == pytest.approx(200)
    assert found["first_token_average"] == pytest.approx(300)
    assert found["first_token_max"] == pytest.approx(500)
    assert found["last_token_average"] == pytest.approx(200)
    assert found["max_decode_time"] == pytest.approx(300)
    assert found["qps"] == 1.0
    assert found["qps_per_device"] == 0.25
    assert found["generate_speed"] == 3.0


def test_answers_of_one_token_have_no_steps() -> None:
    result = RunResult(completions=(completion(0.5),), seconds=1.0, drafts=())
    found = figures(result, [1], num_devices=0)
    assert found["lpot_p50"] is found["max_decode_time"] is found["qps_per_device"] is None
