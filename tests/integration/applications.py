"""What is served in the tests: the applications that share a deployment, and how others differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.integration.cluster import model_path

MAX_NUM_SEQS, MAX_QUEUED = 4, 2

ENGINE: dict[str, Any] = {
    "dtype": "float32",  # in which the same greedy tokens are an equality and no matter of luck
    "max_model_len": 2048,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}
EVERYTHING: dict[str, Any] = {
    # A small model left to itself may put blanks into JSON for ever.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_prompt_embeds": True,
    "enable_scale_out": True,
    "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
}
"""Options of vLLM with which all that it has can be asked for. The other applications have none:
their builders need not import vLLM."""

TENANTS = ("team-a", "team-b", "team-c", "team-d")
KEYS = {f"SPECSERVE_TEST_KEY_{number}": f"sk-{number}" * 8 for number in range(len(TENANTS))}
"""API keys by the environment variables that the nodes have them in."""


def application(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` of an application that serves the draft model; sections are merged into it."""
    base: dict[str, Any] = {
        "model": {"path": str(model_path("demo-draft")), "served_name": ["demo", "default"]},
        "engine": ENGINE,
        # Every draft is sent, also the ones that do not pay.
        "speculation": [{"kind": "ngram", "max_draft_len": 6, "dynamic": False}],
        "placement": {"num_cpus_per_shard": 1},
        "http": {"max_queued_requests": MAX_QUEUED, "retry_after_s": 3},
    }
    return base | {key: {**base[key], **section} for key, section in sections.items()}


def drafted_by(args: dict[str, Any], **source: Any) -> dict[str, Any]:
    """The same application with one source, whose every draft is sent."""
    return args | {"speculation": [{**source, "dynamic": False}]}


def predictable(args: dict[str, Any]) -> dict[str, Any]:
    """The same application, which drafts from predictions as well, where a request has one."""
    prediction = {"kind": "prediction", "dynamic": False}
    return args | {"speculation": [*args["speculation"], prediction]}


def structured(args: dict[str, Any]) -> dict[str, Any]:
    """The same application, which drafts what a grammar forces as well, where a request has one."""
    grammar = {"kind": "grammar", "dynamic": False}
    return args | {"speculation": [*args["speculation"], grammar]}


def remembering(args: dict[str, Any]) -> dict[str, Any]:
    """The same application, which drafts from a memory as well."""
    # Of the usual size: the applications' store has the options of the one that is there first.
    memory = {"kind": "trie", "dynamic": False}
    return args | {"speculation": [*args["speculation"], memory]}


# The target drafts for itself: nearly all is accepted, whatever it writes.
DRAFT_MODEL = {"kind": "draft_model", "model": str(model_path("demo-draft")), "num_cpus": 0}

TENANT_KEYS = [{"env": env, "tenant": name} for env, name in zip(KEYS, TENANTS, strict=True)]

SHARED: dict[str, dict[str, Any]] = {
    # With room for the streams beside what test_fuzz.py tries.
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
"""The applications that most tests use, by their prefixes; all at once."""

TWO_SHARDS = {
    "/": application(engine={"tensor_parallel_size": 2}, placement={"strategy": "STRICT_SPREAD"}),
    "/large": application(
        engine={"tensor_parallel_size": 4}, placement={"timeout_s": 3.0, "num_cpus_per_shard": 6}
    ),
}
"""Two shards on two nodes, and an application that no node can hold."""
