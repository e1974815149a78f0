"""Converts the application's configuration into vLLM's arguments."""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from vllm.config.attention import AttentionConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import (
    FrontendArgs,
    make_arg_parser,
    propagate_flash_late_interaction,
    validate_parsed_serve_args,
)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import import_plugin
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, reason_of
from specserve.core.source_config import DraftModelConfig
from specserve.engine.chat_template import read_chat_template
from specserve.engine.cpu.compilation import missing_for_compilation
from specserve.engine.cuda_graphs import set_graph_sizes
from specserve.engine.executor import CpuRayExecutor, InProcessExecutor, RayExecutor
from specserve.engine.refused_options import ELSEWHERE, check_option

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 1 << 30
"""Default size of a shard's KV cache on CPU."""

_PARSERS = {"tool_call_parser": ToolParserManager, "reasoning_parser": ReasoningParserManager}
"""Options that name a parser, and the registry of these parsers."""

_PLUGINS = ("tool_parser_plugin", "reasoning_parser_plugin")
"""Options that name a Python file or module with more parsers."""

_FIELDS = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
_FRONTEND_FIELDS = {field.name: field for field in dataclasses.fields(FrontendArgs)}


def check_engine_options(config: AppConfig) -> None:
    """Checks ``engine.vllm`` against vLLM's own arguments, as ``vllm serve`` does at its start.

    Where vLLM's GPU build finds no GPU, such as on a cluster's head, names and types alone are
    checked. The engine checks the rest.

    Raises:
        ConfigError: vLLM has no such key, or another field sets it; the value has the wrong type
            or is refused here; or options do not go together.
    """
    options = _vllm_options(config)
    _check_adapter_names(config, options)
    if template := options.get("chat_template"):
        read_chat_template(template, "engine.vllm.chat_template")
    for key, parsers in _PARSERS.items():
        name = options.get(key)
        if not name or name in parsers.list_registered():
            continue
        load_general_plugins()
        known = parsers.list_registered()
        if name not in known:
            raise ConfigError(f"engine.vllm.{key}", name, ", ".join(sorted(known)))
    if not current_platform.device_type:  # vLLM's configuration needs a device
        return
    try:
        validate_parsed_serve_args(serve_namespace(config))
    except (TypeError, ValueError) as error:
        allowed = reason_of(error).removeprefix("Error: ")
        raise ConfigError("engine.vllm", config.engine.vllm, allowed) from None


def _check_adapter_names(config: AppConfig, options: dict[str, Any]) -> None:
    """Refuses adapters that vLLM would refuse after it has loaded the weights."""
    names = list(config.model.names)
    for index, adapter in enumerate(options.get("lora_modules") or ()):
        field = f"engine.vllm.lora_modules.{index}"
        if not options.get("enable_lora"):
            raise ConfigError(field, adapter.name, "no adapter without enable_lora: true")
        if adapter.name in names:
            others = "a name that no other adapter and no served_name has"
            raise ConfigError(f"{field}.name", adapter.name, others)
        names.append(adapter.name)


def _vllm_options(config: AppConfig) -> dict[str, Any]:
    """Returns ``engine.vllm`` with values converted to the types that vLLM declares.

    Imports the plugins that it names, as ``vllm serve`` does.
    """
    options = {}
    for key, value in config.engine.vllm.items():
        field = f"engine.vllm.{key}"
        if key in ELSEWHERE:
            raise ConfigError(field, value, ELSEWHERE[key])
        known = _FIELDS.get(key) or _FRONTEND_FIELDS.get(key)
        if known is None:
            raise ConfigError(field, key, "the fields of vLLM's AsyncEngineArgs or FrontendArgs")
        if key == "attention_backend":
            value = _attention_backend(field, value)
        options[key] = _typed(field, value, known.type)
        check_option(config, key, options[key], _default(known))
        if key == "quantization" and options[key] not in (None, *QUANTIZATION_METHODS):
            raise ConfigError(field, value, ", ".join(sorted(QUANTIZATION_METHODS)))
        if key in _PLUGINS and options[key]:
            _import(field, options[key])
        if key == "middleware":
            for index, each in enumerate(options[key] or ()):
                _import_object(f"{field}.{index}", each)
    return options


@cache
def _import(field: str, plugin: str) -> None:
    """Imports a plugin, once in each process. vLLM logs why an existing file cannot be imported."""
    is_missing = plugin.endswith(".py") and not Path(plugin).is_file()
    try:
        module = None if is_missing else import_plugin(plugin)
    except Exception as error:  # the plugin's own
        raise ConfigError(field, plugin, f"a module without errors: {reason_of(error)}") from error
    if module is None:
        raise ConfigError(field, plugin, "a Python file or a module that can be imported")


def _import_object(field: str, name: str) -> None:
    """Imports ``module.object``, which vLLM would do after it has loaded the weights."""
    module, _, attribute = name.rpartition(".")
    try:
        getattr(import_module(module), attribute)
    except Exception as error:  # the module's own
        allowed = f"a class or function module.name: {reason_of(error)}"
        raise ConfigError(field, name, allowed) from error


@cache
def _can_compile_model() -> bool:
    """Whether vLLM can compile the model here. Logs the reason if not."""
    missing = missing_for_compilation() if current_platform.is_cpu() else ""
    if missing:
        logger.warning(
            "the model is not compiled, so that a step takes up to twice as long: this machine "
            "lacks %s",
            missing,
        )
    return not missing


def _default(option: dataclasses.Field[Any]) -> Any:
    make = option.default_factory
    return option.default if isinstance(make, dataclasses._MISSING_TYPE) else make()


def _attention_backend(field: str, value: Any) -> Any:
    """The backend that a name stands for, as on vLLM's command line."""
    try:
        return AttentionConfig.validate_backend_before(value)
    except ValueError:
        allowed = ", ".join(["auto", *AttentionBackendEnum.__members__])
        raise ConfigError(field, value, allowed) from None


def _typed(field: str, value: Any, annotation: Any) -> Any:
    if isinstance(annotation, str):
        names = {"QuantizationConfigArgs": QuantizationConfigArgs}
        annotation = get_type_hints(AsyncEngineArgs, localns=names)[field.rpartition(".")[2]]
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        adapter = TypeAdapter(annotation)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        for part in first["loc"]:  # may also contain names of a union's types
            try:
                field, value = f"{field}.{part}", value[part]
            except (KeyError, IndexError, TypeError):
                break
        raise ConfigError(field, value, first["msg"][0].lower() + first["msg"][1:]) from None


def serve_namespace(config: AppConfig) -> Namespace:
    """Returns arguments for vLLM's HTTP application, as ``vllm serve`` would parse them."""
    options = _model_options(config) | _vllm_options(config)
    namespace: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in options.items():
        setattr(namespace, name, value)
    namespace.served_model_name = list(config.model.names)
    return namespace


def engine_args(config: AppConfig, speculative_config: dict[str, Any] | None) -> AsyncEngineArgs:
    """Returns vLLM's engine arguments, without executor or worker class.

    Raises:
        ConfigError: an option that vLLM refuses.
    """
    namespace = serve_namespace(config)
    namespace.speculative_config = speculative_config
    try:
        arguments = AsyncEngineArgs.from_cli_args(namespace)
    except (TypeError, ValueError) as error:
        raise ConfigError("engine.vllm", config.engine.vllm, reason_of(error)) from None
    propagate_flash_late_interaction(namespace, arguments)
    return arguments


def served_engine_args(
    config: AppConfig, label_key: bytes = b"", *, in_process: bool = False
) -> AsyncEngineArgs:
    """Returns engine arguments for shards that draft from the configured sources.

    Args:
        config: the application's configuration.
        label_key: see :func:`specserve.trie.namespaces.label`.
        in_process: whether the only shard runs in the engine core's process, or as a Ray actor.
    """
    if config.has_sources:
        arguments = engine_args(
            config,
            {
                "method": "custom_class",
                "model": "specserve.engine.hook.ProposerHook",
                "num_speculative_tokens": config.num_speculative_tokens,
            },
        )
        arguments.additional_config = {
            **(arguments.additional_config or {}),
            "specserve": config.model_dump(mode="json"),
            "specserve_label_key": label_key.hex(),
        }
        arguments.scheduler_cls = "specserve.engine.scheduler.DraftScheduler"
        if not current_platform.is_cpu():
            set_graph_sizes(arguments, config)
    else:
        arguments = engine_args(config, _vllm_speculation(config))
    arguments.worker_cls = worker_cls(drafts=config.has_sources, in_engine=config.drafts_in_engine)
    on_ray = CpuRayExecutor if current_platform.is_cpu() else RayExecutor
    arguments.distributed_executor_backend = InProcessExecutor if in_process else on_ray
    return arguments


def _vllm_speculation(config: AppConfig) -> dict[str, Any] | None:
    """``speculative_config`` of a configured source that vLLM drafts itself; None: no source."""
    for source in config.speculation:
        options: dict[str, Any] = {
            "method": source.kind,
            "num_speculative_tokens": source.max_draft_len,
        }
        if isinstance(source, DraftModelConfig):
            options["model"] = source.model
        return options
    return None


def worker_cls(*, drafts: bool, in_engine: bool = False) -> str:
    """Name of the worker class, by platform and by who drafts: specserve, vLLM or nobody."""
    role = "Speculation" if drafts else "InEngine" if in_engine else ""
    if current_platform.is_cpu():
        return f"specserve.engine.cpu.worker.Cpu{role}Worker"
    return f"specserve.engine.gpu_worker.Gpu{role}Worker" if role else "auto"


def _model_options(config: AppConfig) -> dict[str, Any]:
    engine = config.engine
    options: dict[str, Any] = {
        "model": config.model.path,
        "revision": config.model.revision or None,
        "tokenizer": config.model.tokenizer or config.model.path,
        "dtype": engine.dtype,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "max_model_len": engine.max_model_len or None,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes or None,
        "enforce_eager": engine.enforce_eager or not _can_compile_model(),
        "seed": engine.seed,
    }
    if current_platform.is_cpu() and not engine.kv_cache_memory_bytes:
        options["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    return options
