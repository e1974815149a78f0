"""A draft model in an actor of its own: requests go on without it."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from tests.integration.api import OFF, Api
from tests.integration.cluster import Deployment

pytestmark = pytest.mark.timeout(900)

TEXT: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
ALONE = {"speculation": "draft_model"}
PROMPTS = [f"def function_{number}(value):\n" for number in range(12)]
LONG_PROMPTS = [
    "".join(f"def step_{line}(value):\n    return value * {number}\n" for line in range(60))
    for number in range(4)
]
"""To read them takes more memory than any of the others."""
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
    """What the model writes without speculation."""
    return [write(api, prompt, vllm_xargs=OFF) for prompt in PROMPTS]


def write(api: Api, prompt: str, **options: Any) -> str:
    asked = {"prompt": prompt, "vllm_xargs": ALONE, **TEXT, **options}
    text: str = api.complete(**asked)["choices"][0]["text"]
    return text


def drafter(app: Deployment) -> psutil.Process | None:
    """The drafter's process, if there is one."""
    return next(iter(app.cluster.processes("ray::DraftModelDrafter")), None)


def counts(api: Api) -> tuple[int, int]:
    """Drafts so far, and how many of their first tokens were accepted."""
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


def test_it_may_be_killed_in_the_midst_and_nobody_notices(
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


def test_it_may_hang_and_is_told_to_be_down_until_it_goes_on(
    api: Api, app: Deployment, expected: list[str]
) -> None:
    await_drafts(api, app)
    hung = drafter(app)
    assert hung is not None
    hung.send_signal(signal.SIGSTOP)
    try:
        assert [write(api, prompt) for prompt in PROMPTS] == expected
        app.eventually(lambda: not is_up(api), "the drafter to be told down", WAIT_S)
    finally:
        hung.send_signal(signal.SIGCONT)
    await_drafts(api, app)
    assert is_up(api)


@contextmanager
def no_more_memory(process: psutil.Process) -> Iterator[None]:
    """Has the system refuse whatever a process asks for beyond what it has."""
    before = process.rlimit(resource.RLIMIT_DATA)
    process.rlimit(resource.RLIMIT_DATA, (1, before[1]))  # Linux takes 0 for no limit
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(resource.RLIMIT_DATA, before)


def num_errors(api: Api) -> float:
    """Requests that the drafter, though it was there, did not answer, as Prometheus is told."""
    return api.metric("specserve_drafter_errors_total", source="draft_model")


def test_it_may_run_out_of_memory_and_is_used_again_when_it_has_some(
    api: Api, app: Deployment
) -> None:
    await_drafts(api, app)
    expected = [write(api, prompt, vllm_xargs=OFF) for prompt in LONG_PROMPTS]
    poor, before = drafter(app), num_errors(api)
    assert poor is not None
    with no_more_memory(poor):
        assert [write(api, prompt) for prompt in LONG_PROMPTS] == expected
        # It refuses what it has no room for; or it dies of it, and is started again.
        app.eventually(
            lambda: num_errors(api) > before or not is_up(api), "the refusal to be told", WAIT_S
        )
    await_drafts(api, app)
    assert is_up(api)
