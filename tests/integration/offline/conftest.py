"""A small model in float32, and an engine without speculation, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specserve.compare.engine_process import EngineProcess
from specserve.core.config import AppConfig, parse
from tests.integration.cluster import model_path
from tests.integration.offline.engines import running_engine
from tests.integration.stage import Stage


@pytest.fixture(scope="session")
def config() -> AppConfig:
    return parse(
        {
            "model": {"path": str(model_path("demo-draft"))},
            "engine": {
                "dtype": "float32",
                "max_model_len": 1024,
                "kv_cache_memory_bytes": 128 << 20,
                "enforce_eager": True,
                "vllm": {
                    "structured_outputs_config": {
                        "backend": "xgrammar",
                        "disable_any_whitespace": True,
                    }
                },
            },
            # These options give as many drafts as possible, whatever they cost.
            "speculation": [
                {
                    "kind": "ngram",
                    "max_draft_len": 4,
                    "max_matching_ngram_size": 3,
                    "dynamic": False,
                },
                {"kind": "trie", "max_bytes": 16 << 20, "dynamic": False},
                {"kind": "prediction", "max_draft_len": 4, "dynamic": False},
                {"kind": "grammar", "max_draft_len": 4, "dynamic": False},
            ],
        }
    )


@pytest.fixture(scope="session")
def none_engine(stage: Stage, nodes: Stage, config: AppConfig) -> Iterator[EngineProcess]:
    stage.end()
    nodes.clear()
    with running_engine(config, "none") as engine:
        yield engine


@pytest.fixture
def application(config: AppConfig) -> dict[str, Any]:
    """``args`` of an application in a Serve file."""
    args: dict[str, Any] = config.model_dump(mode="json")
    return args
