"""The arguments of an engine without server."""

from __future__ import annotations

from specserve.core.config import parse
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
