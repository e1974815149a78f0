"""One replica's engine: vLLM's AsyncLLM and its own HTTP application."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import ray
from fastapi import FastAPI
from ray.runtime_env import RuntimeEnv
from ray.util.placement_group import PlacementGroup, placement_group_table
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from specserve.core.config import AppConfig
from specserve.core.errors import EngineError, last_line_of
from specserve.core.metrics import SpeculationSnapshot
from specserve.core.openmp import openmp_environment
from specserve.core.recent import RecentRequest, Tokens
from specserve.engine.args import serve_namespace, served_engine_args
from specserve.engine.beams import extend_beam_search
from specserve.engine.checkpoint import model_identity
from specserve.engine.client import ServedLLM, refuse_long_lists
from specserve.engine.cluster_memory import shared_trie, store_options
from specserve.engine.cpu.backend import choose_latent_attention
from specserve.engine.isolation import TenantLLM, close_routes, part_media, part_responses
from specserve.engine.logits_processors import PROCESSORS
from specserve.engine.parsers import parse_token_by_token
from specserve.engine.prediction import Predictor, report_counts
from specserve.engine.responses import end_with_errors
from specserve.engine.temporary_files import keep_sockets_in_session
from specserve.engine.tenant_memory import TenantMemory
from specserve.engine.tenants import (
    CURRENT_CONTROLS,
    CURRENT_TENANT,
    stamp_requests,
    tenant_fields,
)
from specserve.engine.text_generator import TextGenerator
from specserve.engine.v2_runner_limits import check_before_sending
from specserve.sources.controls import own_fields

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest time in seconds for the sources to stop the threads and actors that they started."""


class Engine:
    """A running engine, with its shards in the bundles of a placement group."""

    def __init__(self, config: AppConfig, llm: AsyncLLM) -> None:
        self._config = config
        self._llm = llm
        self._ping: asyncio.Task[Any] | None = None  # the core answers it between two steps
        self._ping_deadline = 0.0

    @classmethod
    def start(
        cls, config: AppConfig, placement_group: PlacementGroup, label_key: bytes = b""
    ) -> Engine:
        """Starts the engine core and its shards and loads the weights; this takes long.

        Call it inside a running event loop. The engine then belongs to that loop.

        Args:
            config: the application's configuration.
            placement_group: a bundle for each shard, as :func:`shard_bundle` describes them.
            label_key: see :func:`specserve.trie.namespaces.label`.

        Raises:
            EngineError: vLLM refuses the checkpoint or an option, finds no device on this node,
                or its engine core or a shard died while starting.
        """
        prepare_environment(config)
        in_process = _in_process(config, placement_group)
        arguments = served_engine_args(config, label_key, in_process=in_process)
        arguments.max_num_queued_reqs = _max_requests(config)
        if has_processors(config) and not config.speculation:  # else the workers build them
            arguments.logits_processors = [*(arguments.logits_processors or ()), *PROCESSORS]
        try:
            vllm_config = placed_config(config, arguments, placement_group)
        except (ValueError, OSError, RuntimeError) as error:
            raise EngineError(
                f"vLLM refuses the configuration of {config.model.path}: {last_line_of(error)}"
            ) from error
        if in_process:  # the engine core's process inherits these variables
            os.environ.update(openmp_environment(config.placement.num_cpus_per_shard))
        return cls(config, _start_client(config, vllm_config, arguments))

    async def asgi_app(self) -> FastAPI:
        """vLLM's own HTTP application. With API keys it has only the routes safe for tenants."""
        namespace = serve_namespace(self._config)
        # vLLM's routes read the reasoning parser here. The engine's configuration completes it.
        namespace.structured_outputs_config = self._llm.vllm_config.structured_outputs_config
        if self._config.http.api_keys:
            # An empty key switches off vLLM's own check of VLLM_API_KEY.
            namespace.api_key = [""]
        tasks = await self._llm.get_supported_tasks()
        if "generate" not in tasks:
            path, allowed = self._config.model.path, "a model that generates text"
            raise EngineError(f"{path} supports only {', '.join(tasks)}; allowed: {allowed}")
        app: FastAPI = build_app(namespace, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, namespace, tasks)
        refuse_long_lists(app.state.openai_serving_completion, _max_requests(self._config))
        responses = app.state.openai_serving_responses
        end_with_errors(responses)
        extend_beam_search(self._llm.model_config.max_logprobs, self._learn)
        parse_token_by_token()
        report_counts()
        if self._config.http.api_keys:
            close_routes(app)
            part_responses(responses)
        # vLLM sets this attribute when the engine dies. Here Serve's health check ends the replica.
        app.state.server = SimpleNamespace(should_exit=False)
        return app

    def text_generator(self, app: FastAPI) -> TextGenerator:
        """The engine of the generation API."""
        handler = app.state.openai_serving_completion
        return TextGenerator(
            self._llm,
            handler.models,
            handler.request_logger,
            _max_requests(self._config),
            has_processors=has_processors(self._config),
        )

    async def speculation(self) -> SpeculationSnapshot | None:
        """Rank 0's speculation metrics; None without draft sources of specserve."""
        answer = await self._ask_hook("snapshot")
        return None if answer is None else msgspec.json.decode(answer, type=SpeculationSnapshot)

    async def recent_requests(self, tenant: str) -> tuple[RecentRequest[Tokens], ...]:
        """A tenant's last requests; empty without draft sources of specserve."""
        answer = await self._ask_hook("recent_requests", tenant)
        return msgspec.json.decode(answer or b"[]", type=tuple[RecentRequest[Tokens], ...])

    async def _learn(
        self, tokens: list[int], num_prompt_tokens: int, adapter: str, began: float
    ) -> None:
        """Teaches the sources an answer of the current call, if its controls allow learning."""
        fields = dict(own_fields(CURRENT_CONTROLS.get()))
        if self._config.http.api_keys:
            fields |= tenant_fields(CURRENT_TENANT.get())
        try:
            await self._ask_hook("learn", tokens, num_prompt_tokens, fields, adapter, began)
        except Exception as error:  # the answer does not depend on it
            logger.warning("A text was not learned: %s", last_line_of(error))

    async def _ask_hook(self, method: str, *args: object) -> bytes | None:
        """Calls a method of rank 0's hook; None without draft sources of specserve.

        It runs between two steps, so it may wait for one.
        """
        if not self._config.has_sources:
            return None
        answers: list[bytes | None] = await self._llm.collective_rpc(
            "call_hook", envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, (method, *args)
        )
        return answers[0]

    def tenant_memory(self, app: FastAPI) -> TenantMemory:
        """The tenants' interface to the draft memory that the cluster shares."""
        source, identity = shared_trie(self._config), model_identity(self._config.model)
        model = self._llm.model_config
        store = store_options(source, identity, model.get_vocab_size())
        # A copy, because encoding changes state in the tokenizer's Rust part.
        tokenizer: Any = copy.deepcopy(self._llm.get_tokenizer())
        max_chars = model.max_model_len * tokenizer.max_chars_per_token
        adapters = app.state.openai_serving_models.lora_requests
        return TenantMemory(
            store, tokenizer, model.max_model_len, max_chars, lambda: list(adapters)
        )

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """A function from token ids to text, special tokens included; for one thread at a time."""
        # A copy, because encoding changes the tokenizer's Rust part. That fails during a decode.
        tokenizer = copy.deepcopy(self._llm.get_tokenizer())
        return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    def predictor(self) -> Predictor | None:
        """The reader of a call's predicted answer; None: no source drafts from predictions."""
        if "prediction" not in {source.kind for source in self._config.speculation}:
            return None
        return Predictor(self._llm.get_tokenizer(), self._llm.model_config.max_model_len)

    async def check_health(self) -> None:
        """Checks that the engine core answers, and kills it when one step takes too long.

        The limit is ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``, as in vLLM's executor for shards in
        other processes. The requests of a killed core end with an error.

        Raises:
            EngineError: the engine core or one of its shards has died.
        """
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise EngineError("the engine has died; see the replica's log") from error
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(_suppressed(self._llm.is_sleeping()))
            self._ping_deadline = time.monotonic() + envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        elif time.monotonic() > self._ping_deadline:
            logger.error("The engine core hangs in a step: it is killed")
            for process in self._llm.engine_core.resources.engine_manager.processes:
                process.kill()

    async def shutdown(self) -> None:
        """Ends the engine core process and, with it, the shards."""
        try:
            if self._config.has_sources:
                # The sources stop what they started; vLLM kills the shards without notice.
                closing = self._llm.collective_rpc("close_sources", timeout=CLOSE_S)
                with suppress(Exception):  # a dead worker has nothing left to stop
                    await asyncio.wait_for(closing, CLOSE_S)
        finally:
            self._llm.shutdown()


def _start_client(
    config: AppConfig, vllm_config: VllmConfig, arguments: AsyncEngineArgs
) -> ServedLLM:
    """Starts vLLM's engine and its client. With API keys the client separates tenants."""
    client = TenantLLM if config.http.api_keys else ServedLLM
    try:
        # Ray's logger replaces the default one, which `/metrics` needs, so both are named.
        # Ray's comes first, because it removes all of vLLM's series from the registry.
        llm: ServedLLM = client.from_vllm_config(
            vllm_config,
            stat_loggers=[RayPrometheusStatLogger, PrometheusStatLogger],
            enable_log_requests=arguments.enable_log_requests,
            aggregate_engine_logging=arguments.aggregate_engine_logging,
        )
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"the engine did not start: {last_line_of(error)}") from error
    if not config.drafts_in_engine:
        # Else vLLM refuses `min_p` and `logit_bias`; see specserve.engine.sampling.
        llm.input_processor.speculative_config = None
    stamp_requests(llm.engine_core, with_tenants=bool(config.http.api_keys))
    if vllm_config.use_v2_model_runner:
        check_before_sending(llm.engine_core)
    if config.http.api_keys:
        part_media(llm.renderer)
    return llm


async def _suppressed(answer: Awaitable[object]) -> None:
    with suppress(Exception):  # `check_health` reports a dead core
        await answer


def _max_requests(config: AppConfig) -> int:
    """Limit of running and waiting requests."""
    return config.engine.max_num_seqs + config.http.max_queued_requests


def has_processors(config: AppConfig) -> bool:
    """Whether the workers have :mod:`specserve.engine.logits_processors`.

    vLLM allows none beside its own draft methods. Its V2 runner on GPUs needs another interface.
    """
    return config.has_sources or (current_platform.is_cpu() and not config.drafts_in_engine)


def shard_bundle(config: AppConfig) -> dict[str, float]:
    """The Ray resources that one shard needs, as a placement group's bundle."""
    return config.placement.shard_bundle(on_gpu=not current_platform.is_cpu())


def _in_process(config: AppConfig, group: PlacementGroup) -> bool:
    """Whether the shard runs in the engine core's process: a single one, on CPU, on this node.

    On GPU only an actor learns which device its bundle has. A drafter beside rank 0 starts in the
    bundle of the actor that starts it.
    """
    is_one = config.engine.tensor_parallel_size == 1
    if not (is_one and current_platform.is_cpu()) or config.beside_rank_0:
        return False
    (node,) = placement_group_table(group)["bundles_to_node_id"].values()
    return bool(node == ray.get_runtime_context().get_node_id())


def placed_config(
    config: AppConfig, arguments: AsyncEngineArgs, group: PlacementGroup
) -> VllmConfig:
    """vLLM's configuration of an engine whose shards have the bundles of ``group``.

    Raises:
        ValueError, OSError, RuntimeError: vLLM refuses the checkpoint or an option.
    """
    choose_latent_attention(arguments)
    vllm_config = arguments.create_engine_config()
    parallel = vllm_config.parallel_config
    parallel.placement_group = group
    if current_platform.is_cpu():
        # Ray sets one thread for an actor that asks for few CPUs; the bundle has more.
        environment = openmp_environment(config.placement.num_cpus_per_shard)
        parallel.ray_runtime_env = RuntimeEnv(env_vars=environment)
    return vllm_config


def prepare_environment(config: AppConfig) -> None:
    """Sets environment variables that the engine core's process and the shards inherit."""
    # Without the address, the engine core's process starts a second, local Ray.
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    keep_sockets_in_session()
    # On a host without default route vLLM finds 0.0.0.0; Ray knows the right address.
    os.environ.setdefault("VLLM_HOST_IP", ray.util.get_node_ip_address())
    # vLLM does so later in a Ray actor, but `mm_tensor_ipc: torch_shm` needs it before.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if shares := [source.num_gpus for source in config.beside_rank_0.values()]:
        # vLLM has one value for all ranks. Each bundle still reserves a whole GPU, so no other
        # process gets the remaining share of the other ranks' GPUs.
        os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(1 - sum(shares))
