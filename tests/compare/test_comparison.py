from __future__ import annotations

from typing import Any

from specserve.compare.comparison import warm_up
from specserve.engine.generation import Job, Sampling


class Engine:
    """Records the jobs that it is given."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(self, jobs: list[Job], concurrency: int) -> None:
        self.jobs += jobs


def test_no_measured_prompt_is_remembered_from_the_warm_up() -> None:
    engine: Any = Engine()
    jobs = [Job((number, 7, 8), Sampling(max_tokens=4)) for number in range(5)]
    warm_up(engine, jobs, concurrency=3)
    assert [job.prompt_token_ids for job in engine.jobs] == [(8, 7, 0), (8, 7, 1), (8, 7, 2)]
