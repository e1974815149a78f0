"""Finding, reading and splitting off the MTP module's tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specserve.core.errors import ConfigError, SpecServeError
from specserve.drafters.base import Row
from specserve.drafters.kv_cache import Packed, Span
from specserve.drafters.mtp import MtpDrafter
from specserve.drafters.mtp_files import find_mtp, split_mtp
from specserve.drafters.mtp_weights import MtpWeights, dequantize
from tests.drafters.checkpoints import LAYER, quantize, write_copy
from tests.drafters.mtp_reference import MODEL, texts

SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors that the demo base's MTP layer has copies of."""


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def without_copies(name: str) -> bool:
    return not (name.startswith(LAYER) and name.endswith(SHARED))


def weights(folder: Path, dtype: torch.dtype = torch.float32) -> MtpWeights:
    return MtpWeights(find_mtp(str(folder), "model"), dtype, torch.device("cpu"))


def test_only_the_layers_own_tensors_belong_to_the_module() -> None:
    files = find_mtp(str(MODEL), "model")
    assert files.tensors
    assert all(name.startswith(LAYER) for name in files.tensors)
    assert files.embedding == f"{LAYER}embed_tokens.weight"
    assert files.head == f"{LAYER}shared_head.head.weight"


@pytest.mark.parametrize("tied", [False, True])
def test_without_copies_the_targets_tensors_belong_to_the_module(
    tmp_path: Path, tied: bool
) -> None:
    folder = write_copy(
        tmp_path / "model",
        keep=lambda name: without_copies(name) and not (tied and name == "lm_head.weight"),
        num_shards=3,
        tie_word_embeddings=tied,
    )
    read, stored = weights(folder), load_file(MODEL / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"].float()
    head = embedding if tied else stored["lm_head.weight"].float()
    assert torch.equal(read.embedding(4096, 256), embedding)
    assert torch.equal(read.head(4096, 256), head)


def test_block_fp8_is_multiplied_by_its_factors(tmp_path: Path) -> None:
    folder = write_copy(tmp_path / "model", fp8=True, num_shards=2)
    name = "mlp.experts.3.down_proj.weight"  # 256 x 96: its blocks are cut
    assert weights(folder).files.read(f"{LAYER}{name}").dtype == torch.float8_e4m3fn
    original = load_file(MODEL / "model.safetensors")[f"{LAYER}{name}"].float()
    read = weights(folder).part("mlp").get("experts.3.down_proj.weight", 256, 96)
    assert 0 < (read - original).abs().max() < 0.07 * original.abs().max()


def test_each_block_is_dequantized_by_its_own_factor() -> None:
    weight = torch.randn(300, 200) * torch.logspace(-3, 3, 300).unsqueeze(1)
    quantized, factors = quantize(weight)
    assert factors.shape == (3, 2)
    back = dequantize(quantized, factors, (128, 128))
    for rows in (slice(0, 128), slice(128, 256), slice(256, 300)):
        limit = weight[rows].abs().max() * 0.07
        assert (back[rows] - weight[rows]).abs().max() < limit


def load(folder: Path) -> MtpDrafter:
    return MtpDrafter.load(str(folder), max_texts=1, max_tokens=400)


def test_an_fp8_copy_computes_nearly_the_same(tmp_path: Path) -> None:
    folder = write_copy(tmp_path / "model", fp8=True)
    module, text = load(folder).module, texts()[0]
    states = torch.from_numpy(text.states[:400])
    following = torch.from_numpy(text.tokens[1:401]).long()
    with torch.inference_mode():
        each = Packed.of([Span(0, i, i + 1) for i in range(400)], torch.device("cpu"))
        results = module.forward(states, following, each, 400)
        expected = text.entries(400)
        same = module.logits(results).argmax(-1) == module.logits(expected).argmax(-1)
    assert 0 < (results - expected).norm() < 0.1 * expected.norm()
    assert same.float().mean() > 0.9


@pytest.mark.parametrize("fp8", [False, True])
def test_a_split_module_is_the_same_bit_by_bit(tmp_path: Path, fp8: bool) -> None:
    folder = write_copy(tmp_path / "model", keep=without_copies, fp8=fp8, num_shards=3)
    files = find_mtp(str(folder), "model")
    num_bytes = split_mtp(files, tmp_path / "out")
    again = find_mtp(str(tmp_path / "out"), "model")
    assert sorted(again.tensors) == sorted(files.tensors)
    assert num_bytes == sum(again.read(name).nbytes for name in again.tensors)
    for name, file in again.tensors.items():
        before = load_file(files.tensors[name])[name]
        after = load_file(file)[name]
        assert after.dtype == before.dtype
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))


def test_a_split_module_drafts_alone(tmp_path: Path) -> None:
    split_mtp(find_mtp(str(MODEL), "model"), tmp_path / "out")
    whole, alone = load(MODEL), load(tmp_path / "out")
    assert msgspec.structs.replace(alone.card, model=str(MODEL)) == whole.card
    text = texts()[0]
    row = Row(
        key=(b"", 0),
        salt=0,
        start=0,
        tokens=text.tokens[:100],
        states=text.states[:99],
        max_draft_tokens=1,
    )
    assert alone.draft([row])[0].tokens == text.draft(100)


def test_a_failed_split_leaves_no_files(tmp_path: Path) -> None:
    folder = write_copy(tmp_path / "model")
    files = find_mtp(str(folder), "model")
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(SpecServeError, match=r"model/model\.safetensors: .* not fully covered"):
        split_mtp(files, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def anonymous_bytes() -> int:
    """This process's memory that is no mapped file."""
    (line,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) << 10


def test_tensors_are_mapped_into_memory_and_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_copy(tmp_path / "model")
    save_file({"large": torch.ones(64 << 20, dtype=torch.uint8)}, tmp_path / "large")
    files = replace(find_mtp(str(folder), "model"), tensors={"large": tmp_path / "large"})
    in_use: list[int] = []

    def save(tensors: dict[str, torch.Tensor], *others: Any) -> None:
        assert tensors["large"].sum() == 64 << 20  # reads all pages
        save_file(tensors, *others)
        in_use.append(anonymous_bytes())

    monkeypatch.setattr("safetensors.torch.save_file", save)
    before = anonymous_bytes()
    assert split_mtp(files, tmp_path / "out") == 64 << 20
    assert in_use[0] - before < 16 << 20


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", save)
    with pytest.raises(SpecServeError, match=r"out: No space left on device"):
        split_mtp(find_mtp(str(MODEL), "model"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_only_the_modules_files_are_needed(tmp_path: Path) -> None:
    folder = write_copy(tmp_path / "model", num_shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= {"model.norm.weight": "elsewhere.safetensors"}
    index.write_text(json.dumps(content))
    assert find_mtp(str(folder), "model").tensors


def remove_shard(folder: Path) -> None:
    (folder / "part-1.safetensors").unlink()


def cut_shard(folder: Path) -> None:
    path = folder / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def garble_shard(folder: Path) -> None:
    (folder / "part-1.safetensors").write_bytes(b"\xff" * 4096)


def empty_shard(folder: Path) -> None:
    (folder / "part-1.safetensors").write_bytes(b"")


def put_folder_for_shard(folder: Path) -> None:
    remove_shard(folder)
    (folder / "part-1.safetensors").mkdir()


def move_shard(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("part-1", "../part-1"))


def garble_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def lie_in_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= {f"{LAYER}another": "part-0.safetensors"}
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_shard, "with all its files: part-1.safetensors is missing"),
        (cut_shard, "a whole part-1.safetensors (Error while deserializing header: incomplete"),
        (garble_shard, "a whole part-1.safetensors (Error while deserializing header: header too"),
        (empty_shard, "a whole part-1.safetensors (Error while deserializing header: header too"),
        (put_folder_for_shard, "a whole part-1.safetensors (No such device"),
        (move_shard, "a model.safetensors.index.json with a `weight_map` of file names"),
        (garble_config, "a config.json that is a JSON object"),
        (lie_in_index, f"{LAYER}another is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_a_reason(
    tmp_path: Path, damage: Any, message: str
) -> None:
    folder = write_copy(tmp_path / "model", num_shards=2)
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        find_mtp(str(folder), "CHECKPOINT")
    assert str(caught.value).startswith("CHECKPOINT: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": lambda name: not name.startswith(LAYER)}, f"an MTP layer, {LAYER}*"),
        (
            {"keep": lambda name: without_copies(name) and name != "lm_head.weight"},
            "a checkpoint with lm_head.weight",
        ),
        ({"num_hidden_layers": None}, "an MTP layer"),
        ({"architectures": ["GlmMoeForCausalLM"]}, "a checkpoint of DeepseekV3ForCausalLM"),
    ],
)
def test_a_checkpoint_without_a_module_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    folder = write_copy(tmp_path / "model", **options)
    with pytest.raises(ConfigError) as caught:
        find_mtp(str(folder), "CHECKPOINT")
    assert message in str(caught.value)


def test_an_fp8_tensor_without_factors_is_refused(tmp_path: Path) -> None:
    folder = write_copy(
        tmp_path / "model", keep=lambda name: "scale" not in name, fp8=True, num_shards=2
    )
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = f"{LAYER}self_attn.o_proj.weight"
    del content["weight_map"][f"{name}_scale_inv"]
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"a checkpoint with {name}_scale_inv"):
        weights(folder).part("self_attn").get("o_proj.weight", 256, 192)
