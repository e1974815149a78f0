"""Options of vLLM that ``engine.vllm`` may not contain, with the reasons.

There are tables of options that another field sets, that are fixed to vLLM's default, that have no
effect with some value, and that are refused with draft sources or with API keys.
"""

from __future__ import annotations

from typing import Any

from specserve.core.config import AppConfig, EngineConfig
from specserve.core.errors import ConfigError

_LISTENS = "not here: Serve's proxy listens, see http_options"
_SHARDS = "a replica is one engine of engine.tensor_parallel_size shards"
_REPLICAS = "Serve starts the engines, see placement.num_replicas"
_PLACES = "Ray places the shards, see placement"
_TOKENIZER = "text and drafts need the tokenizer"
_V2_RUNNER = "it needs vLLM's V2 model runner, and draft sources its V1 model runner"


def _each(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


ELSEWHERE = {
    "model": "this option is set by model.path",
    "served_model_name": "this option is set by model.served_name",
    "revision": "this option is set by model.revision",
    "tokenizer": "this option is set by model.tokenizer",
    "max_num_queued_reqs": "this option is set by http.max_queued_requests",
    "api_key": "this option is set by http.api_keys",
    "shutdown_timeout": "this option is set by http.drain_timeout_s",
    "root_path": "not here: Serve sets it, see route_prefix and http_options.root_path",
    "distributed_executor_backend": "this option is set by placement",
    **_each(
        "speculative_config spec_method spec_model spec_tokens",
        "this option is set by speculation",
    ),
    **_each("worker_cls scheduler_cls", "specserve sets its own worker and scheduler"),
    **_each("_api_process_count _api_process_rank api_server_count headless", _REPLICAS),
    **_each(
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold "
        "host port uds grpc_port uvicorn_log_level "
        "enable_ssl_refresh ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers "
        "h11_max_incomplete_event_size h11_max_header_count",
        _LISTENS,
    ),
    **_each(
        "disable_uvicorn_access_log disable_access_log_for_endpoints",
        "not here: Serve writes the access log, see logging_config.enable_access_log",
    ),
    **{
        name: f"this option is set by engine.{name}"
        for name in EngineConfig.model_fields
        if name != "vllm"
    },
}
"""Option: which field or system sets it."""

DEFAULT_ONLY = {
    **_each(
        "pipeline_parallel_size prefill_context_parallel_size "
        "enable_elastic_ep elastic_ep_max_dp_size",
        _SHARDS,
    ),
    **_each(
        "data_parallel_size data_parallel_size_local data_parallel_rank "
        "data_parallel_start_rank data_parallel_address data_parallel_rpc_port "
        "data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_backend "
        "enable_fault_tolerance fault_tolerance_config",
        _REPLICAS,
    ),
    **_each(
        "nnodes node_rank master_addr master_port device_ids "
        "numa_bind numa_bind_nodes numa_bind_cpus",
        _PLACES,
    ),
    **_each("skip_tokenizer_init tokens_only", _TOKENIZER),
    "disable_log_stats": "/metrics and the page /speculation need the statistics",
    "enable_request_id_headers": "Serve adds X-Request-Id to every answer",
}
"""Option: why only vLLM's default is allowed."""

NO_EFFECT = {
    "performance_mode": (
        "throughput",
        "it doubles vLLM's defaults of engine.max_num_seqs and engine.max_num_batched_tokens, "
        "which have values here: set these fields",
    ),
}
"""Option: the value without effect, and why."""

NOT_WITH_SOURCES = {
    "async_scheduling": "a draft is made after its step, so steps cannot overlap",
    "logits_processors": "under speculation vLLM runs only its own",
    **_each("watermark_config diffusion_config enable_batch_sharded_sampling", _V2_RUNNER),
}
"""Option: why it is refused with draft sources; a false value is allowed."""

NOT_BACKEND = "lm-format-enforcer"
"""Backend of structured outputs that is refused with draft sources."""

NOT_WITH_KEYS = {
    "enable_scale_out": "a request could name other tenants' requests",
    "tool_server": "tenants would share its sessions",
    "profiler_config": "its routes would profile all tenants' requests",
    **_each(
        "kv_transfer_config ec_transfer_config", "a request could name blocks of other tenants"
    ),
}
"""Option: why it is refused with ``http.api_keys``; a false value is allowed."""


def check_option(config: AppConfig, name: str, value: Any, default: Any) -> None:
    """Raises ConfigError if ``engine.vllm`` may not set this value; ``default`` is vLLM's."""
    field = f"engine.vllm.{name}"
    if name in DEFAULT_ONLY and value != default:
        raise ConfigError(field, value, f"{default!r}, since {DEFAULT_ONLY[name]}")
    if name in NO_EFFECT and value == NO_EFFECT[name][0]:
        raise ConfigError(field, value, f"another value, since {NO_EFFECT[name][1]}")
    if name in NOT_WITH_SOURCES and config.has_sources and value:
        why = NOT_WITH_SOURCES[name]
        raise ConfigError(field, value, f"only without draft sources, since {why}")
    backend = getattr(value, "backend", None) if name == "structured_outputs_config" else None
    if backend == NOT_BACKEND and config.has_sources:
        allowed = "another one with draft sources, since it refuses steps of several tokens"
        raise ConfigError(f"{field}.backend", backend, allowed)
    if name in NOT_WITH_KEYS and config.http.api_keys and value:
        raise ConfigError(field, value, f"only without http.api_keys, since {NOT_WITH_KEYS[name]}")
