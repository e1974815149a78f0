"""A sampling parameter of one request does not change the other answers of its batch.

One request uses the parameter. It is the first or the last one in a batch of five, in turn from
parameter to parameter. All requests but one get drafts. Each answer must be the same as that of the
request alone without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from specserve.compare.prompts import load_prompts, load_tokenizer
from specserve.core.config import AppConfig, parse
from specserve.engine.sampling import is_kept_without_drafts_only
from tests.integration.cluster import model_path
from tests.integration.offline.batches import (
    BatchEngine,
    Logprobs,
    Request,
    Step,
    Written,
    batch_engine,
)
from tests.integration.offline.sampling_uses import END, MAX_TOKENS, THINK, UNUSED, USES, Use

pytestmark = pytest.mark.timeout(900)

TOLERANCE = 1e-3
"""In nats. The batch size changes the order in which float32 numbers are added."""

Answer = tuple[Written, ...]
Alone = Callable[[Request], Answer]


@pytest.fixture(scope="module")
def config() -> AppConfig:
    reasoning = {"reasoning_start_str": THINK, "reasoning_end_str": END}
    return parse(
        {
            "model": {"path": str(model_path("demo-draft"))},
            "engine": {
                "dtype": "float32",
                "max_model_len": 1024,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 128,  # longer prompts take several steps
                "kv_cache_memory_bytes": 128 << 20,
                "enforce_eager": True,
                "vllm": {"reasoning_config": reasoning},
            },
            "speculation": [
                {
                    "kind": "ngram",
                    "max_draft_len": 4,
                    "max_matching_ngram_size": 3,
                    "dynamic": False,
                }
            ],
        }
    )


@pytest.fixture(scope="module")
def engine(config: AppConfig) -> Iterator[BatchEngine]:
    with batch_engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(config: AppConfig) -> list[tuple[int, ...]]:
    """Prompts whose greedy texts have no near ties between tokens.

    The first prompt's text has some uncertain tokens, so that sampling gives another text.
    """
    tokenizer = load_tokenizer(config.model.path)
    (code,) = load_prompts("code", tokenizer, num_prompts=1)
    questions = load_prompts("te", tokenizer, num_prompts=7)
    chat = load_prompts("chat", tokenizer, num_prompts=2)
    return [each.token_ids for each in (questions[6], code, questions[3], questions[1], chat[1])]


@pytest.fixture(scope="module")
def neighbours(prompts: list[tuple[int, ...]]) -> list[Request]:
    """The other requests of a batch. Most have longer answers than the request under test."""
    _, second, third, fourth, fifth = prompts
    longer = 4 * MAX_TOKENS
    return [
        Request(second, {"max_tokens": longer, "logprobs": 2}),
        Request(third, {"max_tokens": longer}),
        Request(fourth, {"max_tokens": longer, "temperature": 0.7, "seed": 3}),
        Request(fifth, {"max_tokens": 12, "extra_args": {"speculation": "off"}}),
    ]


@pytest.fixture(scope="module")
def alone(engine: BatchEngine) -> Alone:
    """The answer to a request that runs alone. Equal requests run once.

    A greedy request runs without drafts. A sampled one gets drafts, because a draft uses random
    numbers of its seed.
    """
    answers: dict[str, Answer] = {}

    def answer(request: Request) -> Answer:
        if not request.params.get("temperature"):
            extra_args = {**request.params.get("extra_args", {}), "speculation": "off"}
            request = replace(request, params={**request.params, "extra_args": extra_args})
        if (name := repr(request)) not in answers:
            (answers[name],) = engine.run([request]).answers
        return answers[name]

    return answer


@pytest.fixture(scope="module")
def expected(alone: Alone, neighbours: list[Request]) -> list[Answer]:
    return [alone(request) for request in neighbours]


def test_every_sampling_parameter_is_in_one_of_the_tables() -> None:
    assert sorted([*USES, *UNUSED]) == sorted(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "use", "is_first"),
    [
        pytest.param(name, use, (place + number) % 2, id=f"{name}-{number}")
        for place, (name, uses) in enumerate(USES.items())
        for number, use in enumerate(uses)
    ],
)
def test_each_request_in_a_batch_gets_the_same_as_alone(
    engine: BatchEngine,
    alone: Alone,
    config: AppConfig,
    prompts: list[tuple[int, ...]],
    neighbours: list[Request],
    expected: list[Answer],
    name: str,
    use: Use,
    is_first: int,
) -> None:
    end = load_tokenizer(config.model.path).encode(use.prompt_end, add_special_tokens=False)
    plain = Request((*prompts[0], *end), {"max_tokens": MAX_TOKENS})
    (text,) = alone(plain)
    params = use.params(text)
    user = replace(plain, params={**plain.params, **params})
    answer = alone(user)

    without = {key: value for key, value in user.params.items() if key != name}
    same = alone(replace(user, params=without)) == answer
    assert same != use.shows, "the parameter must change the answer exactly if `shows` is true"

    num_undrafted = 0 if is_drafted(user) else 1
    place = 0 if is_first else len(neighbours)
    requests, answers = list(neighbours), list(expected)
    requests.insert(place, user)
    answers.insert(place, answer)
    batch = engine.run(requests)
    assert_same(batch.answers, answers)
    assert_mixed_steps(batch.steps, num_undrafted)


def is_drafted(request: Request) -> bool:
    controls = request.params.get("extra_args", {})
    params = SamplingParams(**request.params)
    return controls.get("speculation") != "off" and not is_kept_without_drafts_only(params)


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for row, (got, wanted) in enumerate(zip(answers, expected, strict=True)):
        for one, other in zip(got, wanted, strict=True):
            assert (row, one.text, one.token_ids) == (row, other.text, other.token_ids)
            assert one.stopped_by == other.stopped_by
            assert approximately(one.logprobs) == list(other.logprobs)
            assert approximately(one.prompt_logprobs) == list(other.prompt_logprobs)


def approximately(logprobs: Logprobs) -> list[Any]:
    return [pytest.approx(position, abs=TOLERANCE) for position in logprobs]


def assert_mixed_steps(steps: Sequence[Step], num_undrafted: int) -> None:
    """Asserts that some shared steps had no drafts, some had a few, and some had all drafts."""
    shared = [step for step in steps if step.num_requests > 1]
    assert any(step.num_drafting == 0 for step in shared)
    assert any(0 < step.num_drafting < step.num_requests for step in shared)
    assert any(step.num_drafting == step.num_requests - num_undrafted for step in shared)
