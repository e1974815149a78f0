"""Arguments of the applications that the tests serve, and functions that vary them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.integration.cluster import model_path

MAX_NUM_SEQS, MAX_QUEUED = 4, 2

ENGINE: dict[str, Any] = {
    "dtype": "float32",  # so that greedy tokens are always equal
    "max_model_len": 2048,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}
EVERYTHING: dict[str, Any] = {
    # Otherwise a small model may write whitespace into JSON without end.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_prompt_embeds": True,
    "enable_scale_out": True,
    "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
}
"""Options of vLLM that enable all of its features. The other applications have no such options,
so their builders need not import vLLM."""

TENANTS = ("team-a", "team-b", "team-c", "team-d")
KEYS = {f"SPECSERVE_TEST_KEY_{number}": f"sk-{number}" * 8 for number in range(len(TENANTS))}
"""API keys by the nodes' environment variables that hold them."""


def application(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` of an application that serves the draft model; sections are merged into it."""
    base: dict[str, Any] = {
        "model": {"path": str(model_path("demo-draft")), "served_name": ["demo", "default"]},
        "engine": ENGINE,
        # Every draft is sent, also a draft that costs more than it saves.
        "speculation": [{"kind": "ngram", "max_draft_len": 6, "dynamic": False}],
        "placement": {"num_cpus_per_shard": 1},
        "http": {"max_queued_requests": MAX_QUEUED, "retry_after_s": 3},
    }
    return base | {key: {**base[key], **section} for key, section in sections.items()}


def drafted_by(args: dict[str, Any], **source: Any) -> dict[str, Any]:
    """The same application with one source; every draft of it is sent."""
    return args | {"speculation": [{**source, "dynamic": False}]}


def predictable(args: dict[str, Any]) -> dict[str, Any]:
    """The same application with the source ``prediction`` added."""
    prediction = {"kind": "prediction", "dynamic": False}
    return args | {"speculation": [*args["speculation"], prediction]}


def structured(args: dict[str, Any]) -> dict[str, Any]:
    """The same application with the source ``grammar`` added."""
    grammar = {"kind": "grammar", "dynamic": False}
    return args | {"speculation": [*args["speculation"], grammar]}


def remembering(args: dict[str, Any]) -> dict[str, Any]:
    """The same application with the source ``trie`` added."""
    # Of the default size: applications share a store, which has the options of the first one.
    memory = {"kind": "trie", "dynamic": False}
    return args | {"speculation": [*args["speculation"], memory]}


# The draft model is the target model, so nearly all draft tokens are accepted.
DRAFT_MODEL = {"kind": "draft_model", "model": str(model_path("demo-draft")), "num_cpus": 0}

TENANT_KEYS = [{"env": env, "tenant": name} for env, name in zip(KEYS, TENANTS, strict=True)]

SHARED: dict[str, dict[str, Any]] = {
    # With room for the streams of test_fuzz.py beside its random requests.
    "/": structured(
        predictable(
            application(
                engine={"max_num_seqs": 16, "vllm": EVERYTHING}, http={"max_queued_requests": 32}
            )
        )
    ),
    "/team": predictable(
        drafted_by(application(http={"api_keys": TENANT_KEYS, "show_text": True}), kind="trie")
    ),
    "/drafter": remembering(
        drafted_by(application(http={"generation_api": False, "show_text": True}), **DRAFT_MODEL)
    ),
    "/two": drafted_by(
        application(placement={"num_replicas": 2}, http={"memory_api": "always"}),
        kind="trie",
    ),
}
"""The applications that most tests use, by route prefix. All are served at once."""

TWO_SHARDS = {
    "/": application(engine={"tensor_parallel_size": 2}, placement={"strategy": "STRICT_SPREAD"}),
    "/large": application(
        engine={"tensor_parallel_size": 4}, placement={"timeout_s": 3.0, "num_cpus_per_shard": 6}
    ),
}
"""An application with two shards on two nodes, and one that fits on no node."""
