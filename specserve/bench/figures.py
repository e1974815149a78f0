"""Computes the figures of a performance run, under MindIE's names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specserve.engine.generation import Completion, RunResult

PERCENTILES = (10, 20, 30, 40, 50, 60, 80, 90, 95, 99)


def figures(result: RunResult, input_lengths: Sequence[int], num_devices: int) -> dict[str, Any]:
    """All figures, in milliseconds; ``latency_for_all`` and ``latency_for_per_infer`` in seconds.

    ``lpct`` is the sum of times to the first token divided by the number of input tokens. ``lpot``
    is a step's time divided by its tokens; each step counts once per token. ``last_token`` is the
    time of each request's last step, and ``max_decode_time`` that of the longest step of all.
    ``num_devices`` 0: unknown.
    """
    done = result.completions
    first = np.array([each.first_token_seconds for each in done]) * 1e3
    steps = [_steps(each) for each in done]
    last = np.array([times[-1][0] for times in steps if times]) * 1e3
    decode = np.array([seconds for times in steps for seconds, _ in times]) * 1e3
    lpot = np.array([s / n for times in steps for s, n in times for _ in range(n)]) * 1e3
    output = float(np.mean([len(each.token_ids) for each in done]))
    rate = len(done) / result.seconds
    return {
        "request_num": len(done),
        "average_input_length": float(np.mean(input_lengths)),
        "average_output_length": output,
        "latency_for_all": result.seconds,
        "latency_for_per_infer": float(np.mean([each.seconds for each in done])),
        "lpct": float(first.sum() / sum(input_lengths)),
        **{f"lpot_p{p}": _percentile(lpot, p) for p in PERCENTILES},
        "lpot_max": _percentile(lpot, 100),
        **_spread("first_token", first),
        **_spread("last_token", last),
        "max_decode_time": _percentile(decode, 100),
        "qps": rate,
        "qps_per_device": rate / num_devices if num_devices else None,
        "generate_speed": rate * output,
    }


def _steps(completion: Completion) -> list[tuple[float, int]]:
    """(seconds, tokens) of each step after the one with the first token."""
    times = completion.token_seconds
    ends = [(when, len(list(group))) for when, group in itertools.groupby(times)]
    return [(end - begin, number) for (begin, _), (end, number) in itertools.pairwise(ends)]


def _spread(name: str, values: np.ndarray) -> dict[str, float | None]:
    return {
        f"{name}_average": float(values.mean()) if values.size else None,
        f"{name}_p99": _percentile(values, 99),
        f"{name}_max": _percentile(values, 100),
    }


def _percentile(values: np.ndarray, percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values.size else None
