"""A draft model in a separate actor. Requests go on when it fails."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from tests.integration.api import OFF, Api
from tests.integration.cluster import Deployment, suspend

pytestmark = pytest.mark.timeout(900)

TEXT: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
ALONE = {"speculation": "draft_model"}
PROMPTS = [f"def function_{number}(value):\n" for number in range(12)]
LONG_PROMPTS = [
    "".join(f"def step_{line}(value):\n    return value * {number}\n" for line in range(60))
    for number in range(4)
]
"""The draft model needs more memory for them than for any other prompt."""
WAIT_S = 180.0


@pytest.fixture
def app(shared: Deployment) -> Deployment:
    return shared


@pytest.fixture
def api(shared: Deployment) -> Iterator[Api]:
    api = Api(shared.base_url("/drafter"))
    with api.http:
        yield api


@pytest.fixture
def expected(api: Api) -> list[str]:
    """Output of the model without speculation."""
    return [write(api, prompt, vllm_xargs=OFF) for prompt in PROMPTS]


def write(api: Api, prompt: str, **options: Any) -> str:
    asked = {"prompt": prompt, "vllm_xargs": ALONE, **TEXT, **options}
    text: str = api.complete(**asked)["choices"][0]["text"]
    return text


def drafter(app: Deployment) -> psutil.Process | None:
    """The drafter's process, if there is one."""
    return next(iter(app.cluster.processes("ray::DraftModelDrafter")), None)


def counts(api: Api) -> tuple[int, int]:
    """Number of drafts so far, and of those whose first token was accepted."""
    acceptance = api.speculation()["acceptance"].get("draft_model")
    if acceptance is None:
        return 0, 0
    return acceptance["drafted_at_position"][0], acceptance["accepted_at_position"][0]


def is_up(api: Api) -> bool:
    (source,) = (each for each in api.speculation()["sources"] if each["kind"] == "draft_model")
    return bool(source["up"])


def await_drafts(api: Api, app: Deployment) -> None:
    _, before = counts(api)

    def ask() -> bool:
        write(api, "class Shape:\n")
        return counts(api)[1] > before

    app.eventually(ask, "accepted drafts of the draft model", WAIT_S)


def test_a_model_in_another_process_drafts(api: Api, app: Deployment, expected: list[str]) -> None:
    await_drafts(api, app)
    assert is_up(api)
    before = counts(api)
    assert [write(api, prompt) for prompt in PROMPTS] == expected
    num_drafts, num_accepted = (now - then for now, then in zip(counts(api), before, strict=True))
    assert num_accepted > 0.95 * num_drafts > 0
    acceptance = api.speculation()["acceptance"]["draft_model"]
    assert len(acceptance["acceptance_rate_at_position"]) == 3


def test_a_killed_drafter_changes_no_text_and_restarts(
    api: Api, app: Deployment, expected: list[str]
) -> None:
    await_drafts(api, app)
    killed = drafter(app)
    assert killed is not None
    with ThreadPoolExecutor(3) as pool:
        texts = pool.map(lambda prompt: write(api, prompt), 2 * PROMPTS)
        killed.kill()
        assert list(texts) == 2 * expected
    app.eventually(
        lambda: (found := drafter(app)) is not None and found.pid != killed.pid,
        "a new drafter",
        WAIT_S,
    )
    await_drafts(api, app)


def test_a_hanging_drafter_is_reported_down_until_it_resumes(
    api: Api, app: Deployment, expected: list[str]
) -> None:
    await_drafts(api, app)
    hung = drafter(app)
    assert hung is not None
    suspend(hung)
    try:
        assert [write(api, prompt) for prompt in PROMPTS] == expected
        app.eventually(lambda: not is_up(api), "the drafter is reported down", WAIT_S)
    finally:
        hung.resume()
    await_drafts(api, app)
    assert is_up(api)


@contextmanager
def no_more_memory(process: psutil.Process) -> Iterator[None]:
    """Lets a process allocate no more memory, for the length of a block."""
    before = process.rlimit(resource.RLIMIT_DATA)
    process.rlimit(resource.RLIMIT_DATA, (1, before[1]))  # for Linux 0 means no limit
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(resource.RLIMIT_DATA, before)


def num_errors(api: Api) -> float:
    """Value of the metric that counts the drafter's errors."""
    return api.metric("specserve_drafter_errors_total", source="draft_model")


def test_a_drafter_out_of_memory_is_used_again_once_it_has_memory(
    api: Api, app: Deployment
) -> None:
    await_drafts(api, app)
    expected = [write(api, prompt, vllm_xargs=OFF) for prompt in LONG_PROMPTS]
    poor, before = drafter(app), num_errors(api)
    assert poor is not None
    with no_more_memory(poor):
        assert [write(api, prompt) for prompt in LONG_PROMPTS] == expected
        # It refuses the requests, or it dies and is started again.
        app.eventually(
            lambda: num_errors(api) > before or not is_up(api), "an error is counted", WAIT_S
        )
    await_drafts(api, app)
    assert is_up(api)
