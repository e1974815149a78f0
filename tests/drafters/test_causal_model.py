"""Which transformers models can draft, and whether their results stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from specserve.core.errors import ConfigError
from specserve.drafters.attention import UnsupportedAttention
from specserve.drafters.causal_model import CausalModel
from specserve.drafters.kv_cache import KVCache, Packed, Span

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
NO_WINDOW = {"sliding_window": None}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}


def build(config_class: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config_class(**SIZES | options)).eval()


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (hf.LlamaConfig, {}),
        (hf.Qwen2Config, {}),
        (hf.Qwen3Config, {"head_dim": 32}),
        (hf.MistralConfig, NO_WINDOW),
        (hf.GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    ],
    ids=["llama", "qwen2", "qwen3", "mistral", "gpt2"],
)
def test_logits_over_slots_equal_the_plain_ones(config_class: Any, options: dict[str, Any]) -> None:
    plain, model = (
        build(config_class, **options),
        CausalModel.attach(build(config_class, **options)),
    )
    ids = torch.arange(10, 50)
    cache = KVCache(model.layers, 3, 64, torch.float32, CPU)
    with torch.inference_mode():
        model.forward(ids[:30], cache, Packed.of([Span(2, 0, 25), Span(0, 0, 5)], CPU), 0)
        texts = torch.cat([ids[25:40], ids[5:20]])
        packed = Packed.of([Span(2, 25, 40), Span(0, 5, 20)], CPU)
        found = model.forward(texts, cache, packed, 2)
        # Slot 0 holds tokens 25 .. 29 of `ids`, then 5 .. 19; slot 2 holds the first 40.
        others = torch.cat([ids[25:30], ids[5:20]])
        wanted = torch.stack([plain(text[None]).logits[0, -1] for text in (ids[:40], others)])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config_class", "options", "reason"),
    [
        (hf.MistralConfig, {"sliding_window": 128}, "sliding_window"),
        (hf.PhimoeConfig, {"sliding_window": 128}, "sliding_window"),
        (hf.Gemma2Config, {}, "sliding_attention"),
        (hf.MambaConfig, {}, "linear_attention"),
        (hf.LlamaConfig, DYNAMIC, "dynamic positions"),
        (hf.BloomConfig, {"n_head": 4, "n_layer": 2}, "without transformers' attention interface"),
        (hf.StableLmConfig, {}, "pass no keywords on"),
    ],
    ids=[
        "sliding",
        "sliding mask",
        "partly sliding",
        "recurrent",
        "dynamic",
        "no interface",
        "no keywords",
    ],
)
def test_a_model_with_unsupported_attention_is_refused(
    config_class: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedAttention, match=reason):
        CausalModel.attach(build(config_class, **options))


def test_a_model_with_other_results_over_slots_is_refused() -> None:
    model = build(hf.LlamaConfig, initializer_range=0.5)
    forward = model.forward
    model.forward = lambda position_ids=None, **options: forward(**options)
    with pytest.raises(UnsupportedAttention, match="positions of its own"):
        CausalModel.attach(model)


def test_a_model_with_nan_results_is_refused() -> None:
    model = build(hf.LlamaConfig)
    model.get_input_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(UnsupportedAttention):
        CausalModel.attach(model)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"model: '{tmp_path}' is not allowed.*checkpoint"):
        CausalModel.load(str(tmp_path), torch.float32, CPU)


def test_a_checkpoint_with_unsupported_attention_is_refused_with_its_path(tmp_path: Path) -> None:
    build(hf.MistralConfig, sliding_window=128).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"model: '{tmp_path}' .*sliding_window"):
        CausalModel.load(str(tmp_path), torch.float32, CPU)


def test_a_quantization_without_its_package_is_refused_in_one_line(tmp_path: Path) -> None:
    build(hf.LlamaConfig).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"checkpoint \(.*accelerate") as caught:
        CausalModel.load(str(tmp_path), torch.float32, CPU)
    assert "\n" not in str(caught.value)


def test_code_of_a_checkpoint_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", questions.append)
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    with pytest.raises(ConfigError, match=r"checkpoint \(.* contains custom code"):
        CausalModel.load(str(tmp_path), torch.float32, CPU)
    assert not questions


def test_an_invalid_config_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(ConfigError, match=r"checkpoint \(.*'hidden_size' .*'wide'") as caught:
        CausalModel.load(str(tmp_path), torch.float32, CPU)
    assert "\n" not in str(caught.value)
