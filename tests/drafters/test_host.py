"""A drafter in a child process, with the demo draft model."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.core.errors import EngineError
from specserve.drafters.host import HostedDrafter
from specserve.wire.endpoint import Endpoint
from tests.drafters.fakes import WAIT_S
from tests.drafters.options import options_of
from tests.integration.cluster import eventually

MODELS = Path(__file__).parents[2] / "configs/models"


def hosted(model: Path, gpu: str = "") -> HostedDrafter:
    return HostedDrafter(options_of(str(model)), gpu)


@pytest.fixture
def find() -> Iterator[HostedDrafter]:
    find = hosted(MODELS / "demo-draft")
    yield find
    find.close()


def test_an_ended_drafter_is_started_again_after_a_back_off(
    find: HostedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find()
    assert Endpoint.parse(first).place.startswith("tcp://127.0.0.1:")
    assert Endpoint.parse(first).secret
    assert find() == first
    assert find._process is not None
    find._process.kill()
    find._process.wait()
    options = find._options
    monkeypatch.setattr(find, "_options", replace(options, model="/gone"))
    with pytest.raises(EngineError, match="did not start: model: '/gone' is not allowed"):
        find()
    tried = find._process
    with pytest.raises(EngineError, match="did not start: model: '/gone' is not allowed"):
        find()
    assert find._process is tried
    monkeypatch.setattr(find, "_options", options)
    monkeypatch.setattr(find, "_rest_until", 0.0)
    assert find() != first


def test_a_drafter_that_cannot_load_is_reported_and_not_restarted(tmp_path: Path) -> None:
    find = hosted(tmp_path)
    reason = rf"^the drafter did not start: model: '{tmp_path}' is not allowed; allowed: a causal"
    with pytest.raises(EngineError, match=reason) as first:
        find()
    tried = find._process
    with pytest.raises(EngineError) as again:
        find()
    assert str(again.value) == str(first.value)
    assert "\n" not in str(first.value)
    assert find._process is tried


def test_a_drafter_that_is_killed_while_it_loads_is_not_restarted(
    find: HostedDrafter,
) -> None:
    with ThreadPoolExecutor(1) as threads:
        address = threads.submit(find)
        eventually(lambda: find._process, "a child", WAIT_S, 0.001)
        find.close()
        with pytest.raises(EngineError, match=r"did not start: it ended with exit code -9$"):
            address.result(WAIT_S)


def test_a_closed_drafter_is_not_started_again(
    find: HostedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def close_meanwhile(*args: Any, **options: Any) -> Any:
        find.close()
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", close_meanwhile)
    with pytest.raises(EngineError, match=r"did not start: it ended with exit code -9$"):
        find()
    with pytest.raises(EngineError):
        find()


@pytest.mark.parametrize(("gpu", "visible"), [("GPU-b", "GPU-b"), ("", "GPU-a,GPU-b")])
def test_a_drafter_sees_only_the_gpu_that_is_its_own(
    gpu: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def start(command: object, env: dict[str, str], **options: object) -> SimpleNamespace:
        seen.append(env["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(stdout=StringIO("tcp://address\n"))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(subprocess, "Popen", start)
    assert hosted(MODELS / "demo-draft", gpu)() == "tcp://address"
    assert seen == [visible]
