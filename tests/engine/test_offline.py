"""The arguments of an engine without server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from specserve.core.config import parse
from specserve.core.errors import ConfigError
from specserve.engine import args, executor, offline
from specserve.engine.methods import parse_method
from specserve.engine.offline import _offline_args
from tests.integration.cluster import model_path


def test_requests_without_a_key_use_the_draft_memory_of_an_application_with_keys() -> None:
    config = parse(
        {
            "model": {"path": str(model_path("demo-draft"))},
            "speculation": [{"kind": "trie"}],
            "http": {"api_keys": [{"env": "A_KEY", "tenant": "a"}]},
        }
    )
    args = _offline_args(config, parse_method("trie", config))
    assert args.additional_config["specserve"]["http"]["api_keys"] == []


@pytest.mark.parametrize(
    ("method", "is_async"), [("none", True), ("ngram", False), ("vllm-ngram", False)]
)
def test_on_a_gpu_one_shard_schedules_ahead_if_its_drafts_allow_it(
    method: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[bool | None] = []
    platform = type(current_platform)
    check_on_cpu = platform.check_and_update_config  # switches it off

    def check(vllm_config: VllmConfig) -> None:
        decided.append(vllm_config.scheduler_config.async_scheduling)
        check_on_cpu(vllm_config)

    gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(executor, "current_platform", gpu)
    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check))
    config = parse(
        {"model": {"path": str(model_path("demo-draft"))}, "speculation": [{"kind": "ngram"}]}
    )
    _offline_args(config, parse_method(method, config)).create_engine_config()
    assert decided == [is_async]


BESIDE: dict[str, Any] = {
    "model": {"path": str(model_path("demo-draft"))},
    "speculation": [
        {"kind": "trie"},
        {
            "kind": "draft_model",
            "model": str(model_path("demo-draft")),
            "placement": "beside_rank_0",
            "num_gpus": 0.25,
        },
    ],
}


@pytest.mark.parametrize(
    ("method", "num_shards", "is_cpu", "is_refused"),
    [
        ("all", 2, False, True),
        ("draft_model", 2, False, True),
        ("all", 1, False, False),  # a child process on the same GPU
        ("all", 2, True, False),  # a child process
        ("trie", 2, False, False),
        ("vllm-ngram", 2, False, False),
    ],
)
def test_a_drafter_beside_rank_0_is_refused_where_no_bundle_has_room_for_it(
    method: str,
    num_shards: int,
    is_cpu: bool,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (args, offline):
        monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    engine = {"tensor_parallel_size": num_shards, "gpu_memory_utilization": 0.7}
    config = parse(BESIDE | {"engine": engine})
    if not is_refused:
        _offline_args(config, parse_method(method, config))
        return
    with pytest.raises(ConfigError) as refused:
        _offline_args(config, parse_method(method, config))
    assert str(refused.value) == (
        "speculation.1.placement: 'beside_rank_0' is not allowed; "
        "allowed: actor, where a command starts several shards on GPUs"
    )
