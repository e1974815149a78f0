"""Builds the application: ``import_path: specserve.app:build`` in a Serve config."""

# No `from __future__ import annotations` here: Serve reads the builder's annotation at run time.

import os
from importlib.util import find_spec
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from specserve.core.config import parse
from specserve.core.errors import MissingExtraError, SpecServeError
from specserve.core.importing import without_collections
from specserve.engine.checkpoint import find_checkpoint
from specserve.engine.vllm_version import check_vllm, is_cpu_build
from specserve.engine.weights import check_weights
from specserve.serve.router import router_config
from specserve.serve.server import ModelServer
from specserve.serve.tenants import read_keys
from specserve.trie.log_snapshot import check_snapshot_urls


class BuildError(SpecServeError, RayServeException):
    """A ``RayServeException``, so that Serve shows only its message and does not retry."""


def build(args: dict[str, Any]) -> Application:
    """Builds the application from ``args``, the fields of :class:`specserve.core.config.AppConfig`.

    Raises:
        BuildError: a field has a value that is not allowed, or vLLM is missing or has another
            version than the tested one.
    """
    try:
        return _build(args)
    except SpecServeError as error:
        raise BuildError(str(error)) from None


def _build(args: dict[str, Any]) -> Application:
    config = parse(args)
    checkpoint = find_checkpoint(config.model)
    check_weights(config, checkpoint.path, on_cpu=is_cpu_build())
    model = config.model.model_copy(
        update={
            "path": checkpoint.path,
            "tokenizer": checkpoint.tokenizer,
            "served_name": config.model.names,
        }
    )
    config = config.model_copy(update={"model": model})
    check_snapshot_urls(config)
    read_keys(config.http.api_keys, os.environ)  # each replica reads its own
    if find_spec("vllm") is None:
        raise MissingExtraError("the application")
    check_vllm(config)
    if config.engine.vllm:
        # Imported only if needed: vLLM takes seconds to import.
        with without_collections():
            from specserve.engine.args import check_engine_options

        check_engine_options(config)
    most_requests = config.engine.max_num_seqs + config.http.max_queued_requests
    deployment = serve.deployment(
        ModelServer,
        num_replicas=config.placement.num_replicas,
        # The engine refuses requests over its limit. Serve's limit is higher, so they reach it.
        max_ongoing_requests=2 * most_requests,
        request_router_config=router_config(),
        graceful_shutdown_timeout_s=config.http.drain_timeout_s,
        # Of all replicas together; RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT limits each one's starts.
        max_constructor_retry_count=1000,
        # Serve replaces a replica after three failed checks. Checks are frequent because they cost
        # nothing, and because a dead engine does not recover.
        health_check_period_s=2,
        # The shards reserve the CPUs; the replica itself only passes requests and answers on.
        ray_actor_options={"num_cpus": 0},
    )
    application: Application = deployment.bind(config)
    return application
