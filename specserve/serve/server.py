"""The Serve deployment: one replica holds one engine and serves vLLM's HTTP application."""

from __future__ import annotations

import os
from collections.abc import Iterable
from threading import Thread

import prometheus_client
from ray import serve
from ray.serve.context import _get_global_client
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from specserve.core.config import AppConfig
from specserve.core.errors import EngineError, SpecServeError
from specserve.core.importing import without_collections
from specserve.engine.vllm_version import check_vllm
from specserve.serve import daemons
from specserve.serve.controls import ControlsMiddleware
from specserve.serve.generation.routes import generation_router
from specserve.serve.installation import require_same
from specserve.serve.memory import MemoryApi
from specserve.serve.middleware import (
    DisconnectMiddleware,
    RetryAfterMiddleware,
    add_exception_handlers,
    answer_deep_nesting,
    answer_http_error,
    refuse_adapters,
    refuse_scaling,
    serve_fresh_metrics,
    with_cors_of,
    wrap_routes,
)
from specserve.serve.page import ReplicaView, SpeculationPage
from specserve.serve.placement import other_nodes, reserve
from specserve.serve.progress import Progress
from specserve.serve.speculation import SpeculationMonitor
from specserve.serve.tenants import TenantMiddleware, label_key, read_keys
from specserve.trie.store_actor import await_drain

_LOGS = (
    "enable_log_requests",
    "aggregate_engine_logging",
    "enable_logging_iteration_details",
    "cudagraph_metrics",
)
"""Options of vLLM that ask for log lines of level INFO."""


@serve.ingress()
class ModelServer:
    """One replica."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = config
        self._is_leaving = False
        self._progress = Progress(config.model.name)
        daemons.watch()
        try:
            await self._start()
        except SpecServeError as error:
            self._progress.failed(error)
            raise

    async def _start(self) -> None:
        # vLLM is imported below: it takes seconds, and the process that builds the application does
        # not need it. vLLM reads its log level at import; INFO lines would hide our progress lines.
        logs = any(self._config.engine.vllm.get(each) for each in _LOGS)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if logs else "WARNING")
        # A library of vLLM's routes sets the root logger to this level, or to ERROR without it.
        os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")
        # Again, since this node's version may differ from that of the building node.
        check_vllm(self._config)
        # Not from the building node: Serve keeps its arguments, also when a key has been replaced.
        self._keys = read_keys(self._config.http.api_keys, os.environ)
        with without_collections():
            from specserve.engine.llm import Engine, shard_bundle

        config = self._config
        num_shards = config.engine.tensor_parallel_size
        with self._progress.stage(f"placing {num_shards} shard(s)"):
            group = await reserve(config.placement, shard_bundle(config), num_shards)
            await require_same(group, config.model)
        if others := other_nodes(group):  # Serve itself looks at this node
            Thread(target=self._leave_with, args=(others,), daemon=True).start()
        with self._progress.stage("starting the engine and loading the weights"):
            self._engine = Engine.start(config, group, label_key(self._keys))

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """vLLM's application with our routes and middleware; Serve calls it once."""
        app = await self._engine.asgi_app()
        monitor = SpeculationMonitor(self._config, self._engine.speculation)
        app.include_router(monitor.router())
        context = serve.get_replica_context()
        replicas = serve.get_deployment_handle(context.deployment, context.app_name)
        self._page = SpeculationPage(
            self._config,
            self._engine,
            context.replica_id.unique_id,
            lambda tenant: replicas.broadcast("view", tenant).results_async(return_exceptions=True),
        )
        app.include_router(self._page.router())
        app.include_router(
            MemoryApi(self._config, lambda: self._engine.tenant_memory(app)).router()
        )
        if self._config.http.generation_api:
            app.include_router(generation_router(self._config, self._engine.text_generator(app)))
        serve_fresh_metrics(app, monitor.refresh, prometheus_client.REGISTRY)
        refuse_scaling(app)
        if _most_replicas() > 1:
            refuse_adapters(app)
        add_exception_handlers(
            app, {HTTPException: answer_http_error, RecursionError: answer_deep_nesting}
        )
        in_engine = self._config.drafts_in_engine
        kinds = None if in_engine else [source.kind for source in self._config.speculation]
        predictor = self._engine.predictor()
        wrap_routes(app, lambda routes: ControlsMiddleware(routes, kinds, predictor))
        wrapped: ASGIApp = TenantMiddleware(app, self._keys) if self._keys else app
        self._progress.ready(_base_url())
        wrapped = RetryAfterMiddleware(wrapped, self._config.http.retry_after_s)
        return DisconnectMiddleware(with_cors_of(app, wrapped))

    async def view(self, tenant: str) -> ReplicaView:
        """Returns this replica's data for the page; called by the replica that answers the page."""
        return await self._page.view(tenant)

    async def check_health(self) -> None:
        """Raises if the engine is dead, or a node of its shards is drained.

        After three such checks, Serve lets running requests finish and replaces the replica.
        """
        await self._engine.check_health()
        if self._is_leaving:
            raise EngineError("a node of this replica's shards is drained")

    def _leave_with(self, nodes: Iterable[str]) -> None:
        await_drain(nodes)
        self._is_leaving = True

    async def __del__(self) -> None:
        """Shuts the engine down. Serve calls it after running requests ended or were given up."""
        if hasattr(self, "_engine"):
            await self._engine.shutdown()


def _most_replicas() -> int:
    """Returns how many replicas Serve may start of this deployment."""
    deployment = serve.get_replica_context()._deployment_config
    scaling = deployment.autoscaling_config
    return int(scaling.max_replicas if scaling else deployment.num_replicas)


def _base_url() -> str:
    """Returns the URL of Serve's proxy, with the application's prefix."""
    client = _get_global_client()
    options = client.http_config
    host = "127.0.0.1" if options.host in ("", "0.0.0.0") else options.host
    details = client.get_serve_details()["applications"][serve.get_replica_context().app_name]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{host}:{options.port}{details['route_prefix']}".rstrip("/")
