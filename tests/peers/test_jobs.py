"""The set ``mixed`` has requests for each source, and no request twice."""

from __future__ import annotations

import json

import pytest

from specserve.compare.prompts import load_tokenizer
from specserve.engine.generation import Job
from tests.integration.cluster import model_path
from tests.peers.jobs import JobSets

MAX_TOKENS = 48


@pytest.fixture(scope="module")
def sets() -> JobSets:
    return JobSets(load_tokenizer(str(model_path("demo-base"))), MAX_TOKENS, seed=1)


def test_a_fifth_of_mixed_has_a_prediction_and_a_fifth_a_schema(sets: JobSets) -> None:
    jobs = sets.jobs("mixed", 10)
    assert [index for index, job in enumerate(jobs) if job.sampling.prediction] == [3, 8]
    assert [index for index, job in enumerate(jobs) if job.sampling.json_schema] == [4, 9]
    assert all(in_prompt(job) for job in (jobs[3], jobs[8]))
    assert len({job.sampling.json_schema for job in jobs}) == 3
    assert all(len(json.loads(jobs[each].sampling.json_schema)["required"]) >= 4 for each in (4, 9))
    assert {job.sampling.temperature for job in jobs} == {0.0, 0.7}


def test_mixed_repeats_only_the_tasks_of_again(sets: JobSets) -> None:
    first, second = (sets.jobs("mixed", 10) for _ in range(2))
    same = [a.prompt_token_ids == b.prompt_token_ids for a, b in zip(first, second, strict=True)]
    assert [index for index, is_same in enumerate(same) if is_same] == [1, 6]


def in_prompt(job: Job) -> bool:
    """Whether most of the predicted tokens follow each other in the prompt."""
    pairs = {*zip(job.prompt_token_ids, job.prompt_token_ids[1:], strict=False)}
    predicted = [*zip(job.sampling.prediction, job.sampling.prediction[1:], strict=False)]
    return sum(pair in pairs for pair in predicted) > 0.9 * len(predicted) > 0
