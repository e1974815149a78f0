"""The Serve files in ``configs``, against our own configuration and vLLM's, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specserve.core.config import AppConfig
from specserve.engine.args import check_engine_options, served_engine_args
from specserve.serve.config_file import read
from tests.model_cards import DEEPSEEK_R1, DEEPSEEK_R1_UNQUANTIZED, LLAMA_70B

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(path.name for path in CONFIGS.glob("*.yaml"))


def config(name: str) -> AppConfig:
    (application,) = read(CONFIGS / name).applications
    return application.config


def engine_config(name: str, checkpoint: dict[str, Any], folder: Path) -> Any:
    """vLLM's configuration for the file, with this config.json in the model's folder."""
    (folder / "config.json").write_text(json.dumps(checkpoint))
    file = config(name)
    model = file.model.model_copy(update={"path": str(folder)})
    return served_engine_args(file.model_copy(update={"model": model})).create_engine_config()


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_valid_for_serve_for_us_and_for_vllm(name: str) -> None:
    check_engine_options(config(name))


@pytest.mark.parametrize(
    ("name", "checkpoint", "quantization", "num_shards", "longest_draft"),
    [
        ("r1_mtp.yaml", DEEPSEEK_R1, "fp8", 16, 1),
        ("r1_mtp_int8.yaml", DEEPSEEK_R1_UNQUANTIZED, "int8_per_channel_weight_only", 16, 1),
        ("r1_mtp_hybrid.yaml", DEEPSEEK_R1, "fp8", 16, 16),
        ("r1_h200.yaml", DEEPSEEK_R1, "fp8", 8, 16),
        ("llama_draft.yaml", LLAMA_70B, None, 4, 3),
    ],
)
def test_vllm_accepts_each_file_with_its_checkpoint(
    name: str,
    checkpoint: dict[str, Any],
    quantization: str | None,
    num_shards: int,
    longest_draft: int,
    tmp_path: Path,
) -> None:
    made = engine_config(name, checkpoint, tmp_path)
    assert made.model_config.architecture == checkpoint["architectures"][0]
    assert made.model_config.quantization == quantization
    assert made.model_config.max_model_len == config(name).engine.max_model_len
    assert made.parallel_config.tensor_parallel_size == num_shards
    assert made.speculative_config.num_speculative_tokens == longest_draft


def test_the_int8_file_needs_a_checkpoint_without_fp8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp8"):
        engine_config("r1_mtp_int8.yaml", DEEPSEEK_R1, tmp_path)


def test_r1_files_differ_only_in_checkpoint_and_sources() -> None:
    fp8, hybrid, int8 = map(config, ("r1_mtp.yaml", "r1_mtp_hybrid.yaml", "r1_mtp_int8.yaml"))
    assert hybrid.model_copy(update={"speculation": hybrid.speculation[:1]}) == fp8
    engine = int8.engine.model_copy(update={"vllm": {}})
    mtp = int8.speculation[0].model_copy(update={"model": "/models/DeepSeek-R1-MTP"})
    same = {"engine": engine, "model": fp8.model, "speculation": (mtp,)}
    assert int8.model_copy(update=same) == fp8
