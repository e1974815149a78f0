"""Estimates against numbers computed by hand and against the demo models' files."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from specserve.core.config import AppConfig, parse
from specserve.core.errors import PlacementError
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.drafters.mtp_files import find_mtp
from specserve.engine.memory_estimate import (
    DrafterMemory,
    NoEstimateError,
    check_drafter,
    check_shard,
    drafter_memory,
    shard_memory,
)
from specserve.engine.model_shapes import is_plain_on_cpu, model_parameters, mtp_parameters
from tests.model_cards import DEEPSEEK_R1, DEEPSEEK_R1_UNQUANTIZED, LLAMA_70B

MODELS = Path(__file__).parents[2] / "configs/models"
GIB = 1 << 30


def config(folder: Path, card: dict[str, Any], speculation: Any = (), **engine: Any) -> AppConfig:
    (folder / "config.json").write_text(json.dumps(card))
    return parse(
        {"model": {"path": str(folder)}, "engine": engine, "speculation": list(speculation)}
    )


def test_deepseek_r1_has_671_billion_parameters_and_its_mtp_module_14() -> None:
    # The count of transformers, plus the biases of the routers.
    assert model_parameters(DEEPSEEK_R1).sum() == 671_026_404_352 + 58 * 256
    both = model_parameters(DEEPSEEK_R1) + mtp_parameters(DEEPSEEK_R1)
    assert both.sum() == pytest.approx(684.5e9, rel=1e-4)  # the checkpoint on the hub


def test_llama_70b_has_the_parameters_that_transformers_counts() -> None:
    assert model_parameters(LLAMA_70B).sum() == 70_553_706_496


def test_an_fp8_shard_of_r1_has_a_16th_plus_the_replicated_weights(tmp_path: Path) -> None:
    shard = shard_memory(config(tmp_path, DEEPSEEK_R1, tensor_parallel_size=16))
    assert shard.weights_bytes == pytest.approx((673.1e9 - 1.1e9) / 16 + 1.1e9, rel=2e-3)
    assert shard.kv_token_bytes == 61 * (512 + 64) * 2


def test_r1_with_its_mtp_module_has_the_checkpoints_size(tmp_path: Path) -> None:
    inside = [{"kind": "mtp", "placement": "in_engine"}]
    whole = shard_memory(config(tmp_path, DEEPSEEK_R1, inside))
    assert whole.weights_bytes == pytest.approx(688.6e9, rel=1e-3)  # 641 GiB
    assert whole.kv_token_bytes == 62 * (512 + 64) * 2


def test_a_shard_of_llama_has_a_part_of_the_heads(tmp_path: Path) -> None:
    shard = shard_memory(config(tmp_path, LLAMA_70B, tensor_parallel_size=4))
    assert shard.weights_bytes == pytest.approx(35.3e9, rel=2e-3)
    assert shard.kv_token_bytes == 80 * 2 * 2 * 128 * 2
    many = shard_memory(config(tmp_path, LLAMA_70B, tensor_parallel_size=16))
    assert many.kv_token_bytes == 80 * 2 * 1 * 128 * 2  # a shard has at least one head


FEW_HEADS = DEEPSEEK_R1_UNQUANTIZED | {"num_attention_heads": 3}  # 3 * 2 * 192 = 2 * 576


@pytest.mark.parametrize(
    ("card", "num_shards", "is_plain"),
    [
        (FEW_HEADS, 1, True),
        (FEW_HEADS | {"num_attention_heads": 4}, 1, False),
        (FEW_HEADS | {"num_attention_heads": 4}, 2, True),
        (FEW_HEADS | {"qk_nope_head_dim": 127}, 1, False),  # no kernel for heads of 191
        (FEW_HEADS | {"model_type": "kimi_linear"}, 1, False),
        (FEW_HEADS | {"num_attention_heads": None}, 1, False),
        ({"model_type": "deepseek_v3"}, 1, False),
        (LLAMA_70B, 1, False),
    ],
)
def test_plain_attention_needs_keys_and_values_that_are_at_most_two_latents(
    monkeypatch: pytest.MonkeyPatch, card: dict[str, Any], num_shards: int, is_plain: bool
) -> None:
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    assert is_plain_on_cpu(card, num_shards) == is_plain


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_users_environment_decides_about_plain_attention(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", value)
    for card in (FEW_HEADS, DEEPSEEK_R1):
        assert is_plain_on_cpu(card, 1) == (value == "1")


def test_on_cpu_a_few_heads_cache_keys_and_padded_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    few = config(tmp_path, FEW_HEADS)
    assert shard_memory(few, on_cpu=True).kv_token_bytes == 61 * 3 * 2 * 192 * 2
    assert shard_memory(few).kv_token_bytes == 61 * 576 * 2
    named = config(tmp_path, FEW_HEADS, vllm={"attention_backend": "CPU_MLA"})
    assert shard_memory(named, on_cpu=True).kv_token_bytes == 61 * 576 * 2


@pytest.mark.parametrize("name", ["demo-base", "demo-draft"])
def test_shapes_give_the_number_of_parameters_that_the_files_have(name: str) -> None:
    card = json.loads((MODELS / name / "config.json").read_text())
    mtp = find_mtp(str(MODELS / name), "").tensors if name == "demo-base" else {}
    with safe_open(MODELS / name / "model.safetensors", framework="np") as stored:
        sizes = {each: prod(stored.get_slice(each).get_shape()) for each in stored.offset_keys()}
    assert model_parameters(card).sum() == sum(n for each, n in sizes.items() if each not in mtp)
    if mtp:
        assert mtp_parameters(card).sum() == sum(sizes[each] for each in mtp)


@pytest.mark.parametrize(
    ("section", "linear_bytes"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, 0.5),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": None}}}}, 1.0),
    ],
)
def test_the_size_of_missing_quantized_weights_follows_config_json(
    section: dict[str, Any], linear_bytes: float, tmp_path: Path
) -> None:
    card = LLAMA_70B | {"quantization_config": {"quant_method": "compressed-tensors"} | section}
    linear, plain = 80 * 855_638_016, 2 * 128256 * 8192
    shard = shard_memory(config(tmp_path, card))
    assert shard.weights_bytes == pytest.approx(linear * linear_bytes + plain * 2, rel=1e-4)


def test_the_size_of_quantized_weights_is_from_the_index_or_the_files(tmp_path: Path) -> None:
    awq = LLAMA_70B | {"quantization_config": {"quant_method": "awq"}}
    there = config(tmp_path, awq, tensor_parallel_size=2)
    with pytest.raises(NoEstimateError, match="does not say how many bits"):
        shard_memory(there)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert shard_memory(there).weights_bytes == 500
    index = {"metadata": {"total_size": 3000}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert shard_memory(there).weights_bytes == 1500


@pytest.mark.parametrize(
    "groups",
    [
        {"group_0": {"weights": {"num_bits": 8}}, "group_1": {"weights": {"num_bits": 4}}},
        {"group_0": {"weights": None}},
        {"group_0": {}},
    ],
    ids=["several", "activations alone", "empty"],
)
def test_groups_that_give_no_size_are_an_error(tmp_path: Path, groups: dict[str, Any]) -> None:
    quantized = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(NoEstimateError, match="does not say how many bits all weights have"):
        shard_memory(config(tmp_path, LLAMA_70B | {"quantization_config": quantized}))


def test_weights_that_vllm_quantizes_at_load_are_smaller(tmp_path: Path) -> None:
    def weights_bytes(card: dict[str, Any], quantization: str) -> int:
        options = {"quantization": quantization}
        return shard_memory(config(tmp_path, card, vllm=options)).weights_bytes

    # As in configs/r1_mtp_int8.yaml: routed experts have 653.9 B of the 671.0 B parameters.
    int8 = weights_bytes(DEEPSEEK_R1_UNQUANTIZED, "int8_per_channel_weight_only")
    assert int8 == pytest.approx(653.9e9 + 2 * 17.1e9, rel=1e-3)
    linear, plain = 80 * 855_638_016, 2 * 128256 * 8192
    assert weights_bytes(LLAMA_70B, "fp8_per_block") == pytest.approx(linear + 2 * plain, rel=1e-3)
    # A quantized checkpoint keeps its size.
    assert (
        weights_bytes(DEEPSEEK_R1, "fp8")
        == shard_memory(config(tmp_path, DEEPSEEK_R1)).weights_bytes
    )


def test_the_mtp_drafter_of_r1_computes_in_bfloat16_on_a_gpu(tmp_path: Path) -> None:
    source = MtpConfig(kind="mtp", num_gpus=1, max_texts=64)
    r1 = config(tmp_path, DEEPSEEK_R1, max_model_len=32768)
    memory = drafter_memory(r1, source)
    assert memory.weights_bytes == pytest.approx(26.9e9, rel=2e-3)
    assert memory.kv_cache_bytes == 64 * 32768 * (512 + 64) * 2
    on_cpu = drafter_memory(r1, MtpConfig(kind="mtp"))
    assert on_cpu.weights_bytes == 2 * memory.weights_bytes


def test_a_missing_mtp_module_has_the_size_of_the_models_own(tmp_path: Path) -> None:
    r1 = config(tmp_path, DEEPSEEK_R1, max_model_len=32768)
    own, elsewhere = MtpConfig(kind="mtp"), MtpConfig(kind="mtp", model="/models/none/R1-MTP")
    assert drafter_memory(r1, elsewhere) == drafter_memory(r1, own)


def test_a_draft_model_has_a_cache_for_the_targets_longest_texts(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    draft.mkdir()
    config(draft, LLAMA_70B)
    source = DraftModelConfig(kind="draft_model", model=str(draft), num_gpus=1, max_texts=2)
    memory = drafter_memory(config(target, DEEPSEEK_R1, max_model_len=1000), source)
    assert memory.kv_cache_bytes == 2 * 1000 * 80 * 2 * 8 * 128 * 2


def test_the_kv_cache_is_what_the_weights_leave_of_a_gpu(tmp_path: Path) -> None:
    r1 = config(tmp_path, DEEPSEEK_R1, tensor_parallel_size=16, max_model_len=32768)
    shard = shard_memory(r1)
    left = 0.9 * 80 * GIB - shard.weights_bytes
    assert check_shard(r1, shard, 80 * GIB) == int(left // 70272)
    with pytest.raises(PlacementError, match=r"weights of 40\.2 GiB do not fit into 0\.9 x 40\.0 "):
        check_shard(r1, shard, 40 * GIB)


def test_a_kv_cache_too_small_for_the_longest_request_is_refused(tmp_path: Path) -> None:
    r1 = config(tmp_path, DEEPSEEK_R1, tensor_parallel_size=16, gpu_memory_utilization=0.6)
    with pytest.raises(PlacementError, match=r"room for 119,\d{3} tokens, .* have 163,840"):
        check_shard(r1, shard_memory(r1), 80 * GIB)


def test_a_configured_kv_cache_must_fit_beside_the_weights(tmp_path: Path) -> None:
    given = {"tensor_parallel_size": 16, "max_model_len": 1000, "kv_cache_memory_bytes": 35 * GIB}
    r1 = config(tmp_path, DEEPSEEK_R1, **given)
    assert check_shard(r1, shard_memory(r1), 80 * GIB) == 35 * GIB // 70272
    with pytest.raises(PlacementError, match=r"and KV cache of 35\.0 GiB do not fit into 1 x 70"):
        check_shard(r1, shard_memory(r1), 70 * GIB)


def test_the_shard_cannot_use_the_part_of_a_drafter_beside_rank_0(tmp_path: Path) -> None:
    beside = {"kind": "mtp", "placement": "beside_rank_0", "num_gpus": 0.25}
    engine = {
        "tensor_parallel_size": 16,
        "max_model_len": 1000,
        "gpu_memory_utilization": 0.7,
        "kv_cache_memory_bytes": 35 * GIB,
    }
    r1 = config(tmp_path, DEEPSEEK_R1, [beside], **engine)
    assert check_shard(r1, shard_memory(r1), 101 * GIB) == 35 * GIB // 70272
    with pytest.raises(PlacementError, match=r"of 35\.0 GiB and 441\.9 MiB .* 0\.75 x 100"):
        check_shard(r1, shard_memory(r1), 100 * GIB)


def test_drafts_to_verify_are_no_room_for_the_kv_cache(tmp_path: Path) -> None:
    engine = {"tensor_parallel_size": 16, "max_num_seqs": 64, "max_model_len": 1000}
    without = config(tmp_path, DEEPSEEK_R1, **engine)
    source = {"kind": "ngram", "max_draft_len": 16}
    r1 = config(tmp_path, DEEPSEEK_R1, [source], max_num_batched_tokens=8192, **engine)
    shard = shard_memory(r1)
    # The logits in bfloat16, and in float32 twice, and the probabilities.
    assert shard.verification_bytes == 64 * 16 * 129280 * (2 + 3 * 4)
    assert shard_memory(without).verification_bytes == 0
    left = 0.9 * 80 * GIB - shard.weights_bytes - shard.verification_bytes
    assert check_shard(r1, shard, 80 * GIB) == int(left // 70272)
    with pytest.raises(PlacementError, match=r"40\.2 GiB and 1\.7 GiB to verify drafts do not fit"):
        check_shard(r1, shard, 46 * GIB)


def test_a_drafter_must_fit_into_its_part_of_a_gpu() -> None:
    half = MtpConfig(kind="mtp", num_gpus=0.5)
    memory = DrafterMemory(weights_bytes=30 * GIB, kv_cache_bytes=9 * GIB)
    check_drafter(half, memory, 80 * GIB)
    with pytest.raises(PlacementError, match=r"30\.0 GiB .* 9\.0 GiB do not fit into 30\.0 GiB"):
        check_drafter(half, memory, 60 * GIB)


@pytest.mark.parametrize(
    ("change", "engine", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, {}, "MambaForCausalLM'] is not known"),
        ({"num_hidden_layers": 61}, {"vllm": {"quantization": "mxfp4"}}, "engine.vllm.quantiz"),
        ({"num_hidden_layers": None}, {"vllm": {"cpu_offload_gb": 1}}, "engine.vllm.cpu_off"),
    ],
)
def test_a_size_that_cannot_be_estimated_is_an_error(
    change: dict[str, Any], engine: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NoEstimateError) as caught:
        shard_memory(config(tmp_path, DEEPSEEK_R1 | change, **engine))
    assert reason in str(caught.value)


def test_a_missing_key_of_config_json_is_named(tmp_path: Path) -> None:
    card = {key: value for key, value in DEEPSEEK_R1.items() if key != "kv_lora_rank"}
    with pytest.raises(NoEstimateError, match=r"config\.json has no kv_lora_rank"):
        shard_memory(config(tmp_path, card))
