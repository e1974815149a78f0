from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specserve.core.config import AppConfig, parse
from specserve.core.errors import ConfigError
from specserve.engine.weights import MARK, Division, check_weights, expert_layout
from tests.model_cards import DEEPSEEK_R1_UNQUANTIZED, LLAMA_70B

SHARDED = {"load_format": "sharded_state"}
INT8 = {"quantization": "int8_per_channel_weight_only"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of bfloat16 weights for two shards."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    Division(2, "", "bfloat16").write(tmp_path)
    return tmp_path


def application(
    folder: Path, vllm: dict[str, Any], speculation: Any = (), **engine: Any
) -> AppConfig:
    options = {"tensor_parallel_size": 2, "vllm": vllm} | engine
    return parse(
        {"model": {"path": str(folder)}, "engine": options, "speculation": list(speculation)}
    )


def check(folder: Path, *args: Any, **engine: Any) -> None:
    check_weights(application(folder, *args, **engine), str(folder), on_cpu=True)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_options_that_the_folder_was_made_for_are_accepted(folder: Path, dtype: str) -> None:
    check(folder, SHARDED, dtype=dtype)
    check(folder, SHARDED, [{"kind": "mtp", "model": "/models/mtp"}, {"kind": "ngram"}])


@pytest.mark.parametrize(
    ("own", "made_for", "is_right"),
    [
        ("bfloat16", "float16", False),
        ("bfloat16", "float32", False),
        ("float32", "float32", False),
        ("float32", "float16", True),
    ],
)
def test_dtype_auto_is_the_dtype_that_vllm_chooses(
    folder: Path, own: str, made_for: str, is_right: bool
) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA_70B | {"torch_dtype": own}))
    Division(2, "", made_for).write(folder)
    if is_right:
        check(folder, SHARDED)
    else:
        with pytest.raises(ConfigError, match=rf"engine\.dtype: 'auto' .*: {made_for}, what "):
            check(folder, SHARDED)


@pytest.mark.parametrize(
    ("vllm", "engine", "words"),
    [
        (SHARDED, {"tensor_parallel_size": 4}, r"engine\.tensor_parallel_size: 4 .*: 2, what "),
        (SHARDED | {"quantization": "fp8"}, {}, r"engine\.vllm\.quantization: 'fp8' .*: none, "),
        (SHARDED, {"dtype": "float32"}, r"engine\.dtype: 'float32' .*: bfloat16, what "),
        ({}, {}, r"engine\.vllm\.load_format: 'auto' .*: sharded_state, for which "),
    ],
)
def test_options_that_it_was_not_made_for_are_refused(
    folder: Path, vllm: dict[str, Any], engine: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(folder, vllm, **engine)


BALANCED = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ({}, r"engine\.vllm\.enable_expert_parallel: False .*: True, what "),
        (
            {"enable_expert_parallel": True, "expert_placement_strategy": "linear"},
            r"engine\.vllm\.expert_placement_strategy: 'linear' .*: round_robin, what ",
        ),
        (
            {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
            r"engine\.vllm\.eplb_config\.num_redundant_experts: 0 .*: 2, what ",
        ),
    ],
)
def test_experts_in_other_places_than_the_folder_has_them_are_refused(
    folder: Path, served: dict[str, Any], words: str
) -> None:
    made = {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin", **BALANCED}
    Division(2, "", "bfloat16", *expert_layout(made).values()).write(folder)
    check(folder, SHARDED | made)
    with pytest.raises(ConfigError, match=words):
        check(folder, SHARDED | served)


def test_a_mark_without_an_expert_layout_means_the_default(folder: Path) -> None:
    mark = {"tensor_parallel_size": 2, "quantization": "", "dtype": "bfloat16"}
    (folder / MARK).write_text(json.dumps(mark))
    check(folder, SHARDED)
    with pytest.raises(ConfigError, match=r"engine\.vllm\.enable_expert_parallel: True .*: False,"):
        check(folder, SHARDED | {"enable_expert_parallel": True})


def test_the_quantization_of_the_checkpoint_may_be_named(folder: Path) -> None:
    Division(2, "fp8", "bfloat16").write(folder)
    check(folder, SHARDED | {"quantization": "fp8"})
    check(folder, SHARDED)


def test_sources_that_would_load_what_the_folder_lacks_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.0\.placement: .*: actor or beside"):
        check(folder, SHARDED, [{"kind": "mtp", "placement": "in_engine"}])
    with pytest.raises(ConfigError, match=r"speculation\.0\.model: '' .*split-mtp"):
        check(folder, SHARDED, [{"kind": "mtp"}])


def test_a_folder_without_a_readable_mark_is_not_loaded_as_shards(folder: Path) -> None:
    (folder / MARK).write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path: .* a folder with a readable specserve_"):
        check(folder, SHARDED)
    (folder / MARK).unlink()
    with pytest.raises(ConfigError, match=r"load_format: .* that `specserve shard-weights` made"):
        check(folder, SHARDED)
    check(folder, {})


def test_int8_needs_a_model_with_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1_UNQUANTIZED))
    check(tmp_path, INT8)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    with pytest.raises(ConfigError, match=r"quantization: .* quantizes experts only"):
        check(tmp_path, INT8)


def test_a_hub_id_is_not_looked_up() -> None:
    check_weights(application(Path("org/name"), SHARDED), "org/name", on_cpu=True)


YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
BY_LAYER = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}


@pytest.mark.parametrize(
    ("card", "engine", "words"),
    [
        ({}, {"tensor_parallel_size": 3}, "engine.tensor_parallel_size: 3 is not allowed; "
         "allowed: a divisor of the model's 4 attention heads"),
        ({}, {"max_model_len": 4097}, "engine.max_model_len: 4097 is not allowed; "
         "allowed: at most 4096, the model's max_position_embeddings"),
        (YARN, {"max_model_len": 4097}, "engine.max_model_len: 4097"),
        ({}, {"max_model_len": 4096, "tensor_parallel_size": 2}, ""),
        (LINEAR, {"max_model_len": 16384}, ""),
        (BY_LAYER, {"max_model_len": 16384}, ""),
        ({"text_config": {"num_attention_heads": 3}}, {"tensor_parallel_size": 3}, ""),
        ({"model_max_length": 8192}, {"max_model_len": 8192}, ""),
        ({}, {"max_model_len": 8192, "vllm": {"hf_overrides": {"n_positions": 8192}}}, ""),
    ],
)  # fmt: skip
def test_sizes_that_vllm_would_refuse_at_load_are_refused_early(
    tmp_path: Path, card: dict[str, object], engine: dict[str, object], words: str
) -> None:
    sizes = {"num_attention_heads": 4, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sizes | card))
    config = parse({"model": {"path": str(tmp_path)}, "engine": engine})
    if words:
        with pytest.raises(ConfigError) as error:
            check_weights(config, str(tmp_path), on_cpu=True)
        assert str(error.value).startswith(words)
    else:
        check_weights(config, str(tmp_path), on_cpu=True)


@pytest.mark.parametrize("kind", ["fp8", "int8_per_token_head"])
def test_latent_attention_on_cpu_refuses_a_quantized_kv_cache(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1_UNQUANTIZED))
    config = application(tmp_path, {"kv_cache_dtype": kind})
    with pytest.raises(ConfigError, match=f"^engine.vllm.kv_cache_dtype: '{kind}' is not allowed"):
        check_weights(config, str(tmp_path), on_cpu=True)
    check_weights(config, str(tmp_path), on_cpu=False)
    for card in (LLAMA_70B, DEEPSEEK_R1_UNQUANTIZED | {"model_type": "minicpm3"}):
        (tmp_path / "config.json").write_text(json.dumps(card))
        check_weights(config, str(tmp_path), on_cpu=True)


@pytest.mark.parametrize(
    "options", [{"attention_backend": "CPU_MLA"}, {"attention_config": {"backend": "CPU_MLA"}}]
)
def test_plain_attention_on_cpu_has_quantized_kv_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    few_heads = DEEPSEEK_R1_UNQUANTIZED | {"num_attention_heads": 6}  # of two shards
    (tmp_path / "config.json").write_text(json.dumps(few_heads))
    check_weights(application(tmp_path, {"kv_cache_dtype": "fp8"}), str(tmp_path), on_cpu=True)
    latent = application(tmp_path, {"kv_cache_dtype": "fp8", **options})
    with pytest.raises(ConfigError, match=r"^engine.vllm.kv_cache_dtype"):
        check_weights(latent, str(tmp_path), on_cpu=True)


def test_adapters_beside_experts_need_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1_UNQUANTIZED))
    config = application(tmp_path, {"enable_lora": True})
    with pytest.raises(ConfigError, match=r"^engine.vllm.enable_lora: True is not allowed; .* CPU"):
        check_weights(config, str(tmp_path), on_cpu=True)
    check_weights(config, str(tmp_path), on_cpu=False)
    elsewhere = {"enable_lora": True, "lora_target_modules": ["q_proj"]}
    check_weights(application(tmp_path, elsewhere), str(tmp_path), on_cpu=True)
    for card in (LLAMA_70B, LLAMA_70B | {"num_local_experts": 0, "_name_or_path": "my-expert"}):
        (tmp_path / "config.json").write_text(json.dumps(card))
        check_weights(config, str(tmp_path), on_cpu=True)
