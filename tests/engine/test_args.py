"""vLLM's arguments from the configuration, with vLLM's own classes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
from vllm.platforms import current_platform
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.reasoning import ReasoningParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from specserve.core.config import AppConfig, parse
from specserve.core.errors import ConfigError
from specserve.engine import args
from specserve.engine.args import check_engine_options, serve_namespace, served_engine_args
from specserve.engine.executor import InProcessExecutor, RayExecutor
from specserve.engine.refused_options import (
    DEFAULT_ONLY,
    ELSEWHERE,
    NO_EFFECT,
    NOT_WITH_KEYS,
    NOT_WITH_SOURCES,
)


def config(vllm: dict[str, Any] | None = None, **sections: Any) -> AppConfig:
    return parse({"model": {"path": "m"}, "engine": {"vllm": vllm or {}}, **sections})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_prefix_cachin": True}, "AsyncEngineArgs or FrontendArgs"),
        ({"dtype": "auto"}, "engine.dtype"),
        ({"speculative_config": {}}, "speculation"),
        ({"max_num_queued_reqs": 3}, "http.max_queued_requests"),
        ({"enable_prefix_caching": "perhaps"}, "valid boolean"),
        ({"block_size": "large"}, "valid integer"),
        ({"chat_template": "{% if a %}"}, "Unexpected end of template"),
        ({"chat_template": "/no/such.jinja"}, "No such file"),
        ({"quantization": "weight_only_int8"}, "int8_per_channel_weight_only"),
        ({"tool_call_parser": "hermess"}, "hermes"),
        ({"reasoning_parser": "deepseek_r0"}, "deepseek_r1"),
        ({"middleware": ["foo"]}, "a class or function module.name"),
        ({"middleware": ["json.Missing"]}, "has no attribute 'Missing'"),
        ({"tool_parser_plugin": "/no/such.py"}, "a Python file or a module that can be imported"),
        ({"ssl_keyfile": "key.pem"}, "http_options"),
        ({"api_key": ["sk-1"]}, "http.api_keys"),
        ({"uds": "/run/socket"}, "http_options"),
        ({"root_path": "/llm"}, "route_prefix"),
        ({"shutdown_timeout": 5}, "http.drain_timeout_s"),
        ({"disable_log_stats": True}, "False, since /metrics and the page"),
        ({"enable_request_id_headers": True}, "False, since Serve adds X-Request-Id"),
        ({"headless": True}, "placement.num_replicas"),
        ({"api_server_count": 2}, "placement.num_replicas"),
        ({"spec_tokens": 3}, "speculation"),
        ({"disable_uvicorn_access_log": True}, "logging_config.enable_access_log"),
        ({"performance_mode": "throughput"}, "set these fields"),
        ({"worker_cls": "my.Worker"}, "its own worker"),
        ({"scheduler_cls": "my.Scheduler"}, "its own worker"),
        ({"pipeline_parallel_size": 2}, "1, since a replica is one engine"),
        ({"prefill_context_parallel_size": 2}, "1, since a replica is one engine"),
        ({"data_parallel_size": 2}, "1, since Serve starts the engines"),
        ({"data_parallel_rank": 0}, "None, since Serve starts the engines"),
        ({"data_parallel_backend": "ray"}, "'mp', since Serve starts the engines"),
        ({"nnodes": 2}, "1, since Ray places the shards"),
        ({"device_ids": [1]}, "None, since Ray places the shards"),
        ({"skip_tokenizer_init": True}, "the tokenizer"),
    ],
)
def test_an_option_vllm_cannot_take_is_refused_with_its_name(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"engine.vllm.{next(iter(options))}") as refused:
        check_engine_options(config(options))
    assert words in refused.value.allowed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_auto_tool_choice": True}, "--enable-auto-tool-choice requires --tool-call-pars"),
        ({"enable_log_outputs": True}, "--enable-log-outputs requires --enable-log-requests"),
        ({"sse_keep_alive_interval": -1}, "--sse-keep-alive-interval must be a non-negative"),
    ],
)
def test_options_that_vllm_serve_refuses_together_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_engine_options(config(options))
    assert (refused.value.field, refused.value.value) == ("engine.vllm", options)
    assert refused.value.allowed.startswith(words)


def test_an_attention_backend_is_named_as_on_vllms_command_line() -> None:
    options = serve_namespace(config({"attention_backend": "cpu_attn"}))
    assert options.attention_backend is AttentionBackendEnum.CPU_ATTN
    with pytest.raises(ConfigError, match="attention_backend: 'foo' is not allowed") as refused:
        check_engine_options(config({"attention_backend": "foo"}))
    assert "CPU_ATTN" in refused.value.allowed


def test_every_option_of_vllm_has_a_type_that_can_be_checked() -> None:
    for name in args._FIELDS.keys() - ELSEWHERE.keys():
        with suppress(ConfigError):
            args._vllm_options(config({name: object()}))
    kept = config({"quantization_config": {"ignore": ["lm_head"]}})
    assert args._vllm_options(kept)["quantization_config"]


@pytest.mark.parametrize(
    ("names", "enable_lora", "field"),
    [
        (["a"], False, "lora_modules.0"),
        (["a", "a"], True, "lora_modules.1.name"),
        (["a", "served"], True, "lora_modules.1.name"),
    ],
)
def test_adapters_that_vllm_refuses_after_loading_are_refused_before(
    names: list[str], enable_lora: bool, field: str
) -> None:
    modules = [{"name": name, "path": "org/name"} for name in names]
    options = {"enable_lora": enable_lora, "lora_modules": modules}
    with pytest.raises(ConfigError, match=f"engine.vllm.{field}: '{names[-1]}' is not allowed"):
        check_engine_options(config(options, model={"path": "m", "served_name": "served"}))


def test_a_backend_that_fails_on_drafts_is_refused_with_sources() -> None:
    options = {"structured_outputs_config": {"backend": "lm-format-enforcer"}}
    check_engine_options(config(options))
    with pytest.raises(ConfigError, match=r"structured_outputs_config\.backend: 'lm-format-enf"):
        check_engine_options(config(options, speculation=[{"kind": "ngram"}]))


def test_a_plugins_parser_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in ("reasoning_parsers", "lazy_parsers"):
        known = dict(vars(ReasoningParserManager)[registry])
        monkeypatch.setattr(ReasoningParserManager, registry, known)
    plugin = tmp_path / "a_plugin_of_a_test.py"
    plugin.write_text(
        "from vllm.reasoning import ReasoningParserManager\n"
        "from vllm.reasoning.identity_reasoning_parser import IdentityReasoningParser\n"
        "ReasoningParserManager.register_module('mine')(IdentityReasoningParser)\n"
    )
    with pytest.raises(ConfigError, match="reasoning_parser: 'mine' is not allowed"):
        check_engine_options(config({"reasoning_parser": "mine"}))
    options = {"reasoning_parser": "mine", "reasoning_parser_plugin": str(plugin)}
    check_engine_options(config(options))
    plugin.write_text("1 / 0")
    broken = plugin.rename(plugin.with_name("another.py"))
    with pytest.raises(ConfigError, match="reasoning_parser_plugin: "):
        check_engine_options(config({"reasoning_parser_plugin": str(broken)}))


@pytest.mark.parametrize(
    "options",
    [
        {"enable_scale_out": True},
        {"tool_server": "demo"},
        {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
        {"profiler_config": {"profiler": "torch", "torch_profiler_dir": "/tmp"}},
    ],
)
def test_an_option_that_tenants_would_share_is_refused_with_api_keys(
    options: dict[str, Any],
) -> None:
    check_engine_options(config(options))
    shared = config(options, http={"api_keys": [{"env": "A_KEY", "tenant": "a"}]})
    with pytest.raises(ConfigError) as refused:
        check_engine_options(shared)
    assert refused.value.field == f"engine.vllm.{next(iter(options))}"
    assert "http.api_keys" in refused.value.allowed


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [("compilation_config", "mode", "fastest"), ("limit_mm_per_prompt", "image", "many")],
)
def test_an_error_inside_an_option_names_its_path_and_its_value(
    option: str, key: str, value: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_engine_options(config({option: {key: value}}))
    assert refused.value.field == f"engine.vllm.{option}.{key}"  # without the types of a union
    assert refused.value.value == value


def test_options_can_be_checked_where_vllm_finds_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = UnspecifiedPlatform()
    monkeypatch.setattr("vllm.platforms._current_platform", nowhere)
    monkeypatch.setattr(args, "current_platform", nowhere)
    check_engine_options(config({"reasoning_parser": "deepseek_r1"}))
    with pytest.raises(ConfigError, match=r"^engine\.vllm\.reasoning_parser: 'none such' "):
        check_engine_options(config({"reasoning_parser": "none such"}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"async_scheduling": True}, "steps cannot overlap"),
        ({"logits_processors": ["my.Processor"]}, "under speculation"),
        ({"watermark_config": {"key": 1}}, "V2 model runner"),
    ],
)
def test_an_option_that_draft_sources_forbid_is_refused_only_with_them(
    options: dict[str, Any], words: str
) -> None:
    check_engine_options(config(options))
    in_engine = [{"kind": "mtp", "placement": "in_engine"}]
    check_engine_options(config(options, speculation=in_engine))
    with pytest.raises(ConfigError, match=f"engine.vllm.{next(iter(options))}") as refused:
        check_engine_options(config(options, speculation=[{"kind": "ngram"}]))
    assert words in refused.value.allowed


def test_an_option_with_its_only_allowed_value_is_accepted() -> None:
    same = {"pipeline_parallel_size": 1, "data_parallel_backend": "mp", "async_scheduling": False}
    check_engine_options(config(same, speculation=[{"kind": "ngram"}]))


def test_every_refused_option_exists_in_vllm() -> None:
    names = {field.name for field in (*fields(FrontendArgs), *fields(AsyncEngineArgs))}
    names |= set(vars(make_arg_parser(FlexibleArgumentParser()).parse_args([])))
    assert names >= {*ELSEWHERE, *DEFAULT_ONLY, *NO_EFFECT, *NOT_WITH_SOURCES, *NOT_WITH_KEYS}


def test_engine_and_frontend_options_reach_vllm() -> None:
    namespace = serve_namespace(config({"enable_prefix_caching": False, "max_log_len": 7}))

    assert namespace.enable_prefix_caching is False
    assert namespace.max_log_len == 7


def test_our_own_options_reach_vllm() -> None:
    model = {"path": "m", "revision": "main", "tokenizer": "other"}
    engine = {"gpu_memory_utilization": 0.5, "seed": 3}
    namespace = vars(serve_namespace(parse({"model": model, "engine": engine})))
    assert namespace["model"] == "m"
    wanted = {"revision": "main", "tokenizer": "other", **engine}
    assert {name: namespace[name] for name in wanted} == wanted


def test_a_section_becomes_vllms_own_class() -> None:
    options = {"structured_outputs_config": {"backend": "xgrammar"}}

    assert serve_namespace(config(options)).structured_outputs_config.backend == "xgrammar"


def test_vllm_reserves_room_for_the_longest_draft_of_all_sources() -> None:
    sources = [{"kind": "ngram", "max_draft_len": 11}]
    arguments = served_engine_args(config(speculation=sources))

    assert arguments.speculative_config["num_speculative_tokens"] == 11
    assert arguments.scheduler_cls == "specserve.engine.scheduler.DraftScheduler"
    assert arguments.worker_cls.startswith("specserve.engine.")
    assert arguments.additional_config["specserve"]["speculation"] == [
        {**config(speculation=sources).speculation[0].model_dump()}
    ]


def test_the_hook_gets_the_label_key() -> None:
    sources = [{"kind": "trie"}]
    passed = served_engine_args(config(speculation=sources), b"a key").additional_config
    assert bytes.fromhex(passed["specserve_label_key"]) == b"a key"


def test_without_sources_the_worker_has_no_hook_but_our_kernels() -> None:
    arguments = served_engine_args(config())

    assert arguments.speculative_config is None
    expected = "specserve.engine.cpu.worker.CpuWorker" if current_platform.is_cpu() else "auto"
    assert arguments.worker_cls == expected


def test_a_shard_is_an_actor_unless_the_engine_core_holds_it() -> None:
    on_ray, held = served_engine_args(config()), served_engine_args(config(), in_process=True)
    assert issubclass(on_ray.distributed_executor_backend, RayExecutor)
    assert held.distributed_executor_backend is InProcessExecutor
    assert held.worker_cls == on_ray.worker_cls


def test_the_served_name_is_the_path_unless_one_is_given() -> None:
    named = parse({"model": {"path": "m", "served_name": "demo"}})
    several = parse({"model": {"path": "m", "served_name": ["demo", "default"]}})

    assert serve_namespace(config()).served_model_name == ["m"]
    assert serve_namespace(named).served_model_name == ["demo"]
    assert serve_namespace(several).served_model_name == ["demo", "default"]


@pytest.mark.parametrize("source", [{"kind": "mtp"}, {"kind": "draft_model", "model": "small"}])
def test_an_in_engine_source_is_vllms_own_method_without_our_hook(
    source: dict[str, Any],
) -> None:
    arguments = served_engine_args(
        config(speculation=[{**source, "placement": "in_engine", "max_draft_len": 2}])
    )
    expected = {"method": source["kind"], "num_speculative_tokens": 2}
    if "model" in source:
        expected["model"] = source["model"]
    assert arguments.speculative_config == expected
    assert arguments.worker_cls.endswith("InEngineWorker")
    assert not arguments.additional_config


@pytest.mark.parametrize("missing", ["", "a compiler"])
def test_on_cpu_a_model_is_compiled_if_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    monkeypatch.setattr(args, "missing_for_compilation", lambda: missing)
    args._can_compile_model.cache_clear()
    is_eager = bool(missing) and current_platform.is_cpu()
    assert served_engine_args(config()).enforce_eager == is_eager
    assert ("lacks a compiler" in caplog.text) == is_eager
    args._can_compile_model.cache_clear()
