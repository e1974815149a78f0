from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specserve.core.config import ModelConfig, parse
from specserve.core.errors import ConfigError
from specserve.engine.checkpoint import find_checkpoint, fingerprint, model_identity, text_sizes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def identity(path: object, **fields: str) -> str:
    return model_identity(ModelConfig(path=str(path), **fields))


def test_the_same_files_are_the_same_model_in_any_folder(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").write_bytes(b"weights")
    (copy / "README.md").write_text("a card")
    assert identity(folder) == identity(copy)


def test_find_checkpoint_does_not_change_the_identity(folder: Path) -> None:
    found = find_checkpoint(ModelConfig(path=str(folder)))
    assert identity(folder) == identity(found.path, tokenizer=found.tokenizer)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_another_config_or_tokenizer_is_another_model(folder: Path, name: str) -> None:
    before = identity(folder)
    (folder / name).write_text((folder / name).read_text() + "\n")
    assert identity(folder) != before


def test_an_added_tokenizer_file_makes_another_model(folder: Path) -> None:
    before = identity(folder)
    (folder / "added_tokens.json").write_text("{}")
    assert identity(folder) != before


def test_another_revision_is_another_model(folder: Path) -> None:
    assert identity(folder, revision="a") != identity(folder, revision="b")


def test_another_tokenizer_folder_makes_another_model(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    assert identity(folder, tokenizer=str(other)) != identity(folder)


def test_a_hub_model_is_its_id_revision_and_tokenizer() -> None:
    names = [
        identity("org/name"),
        identity("org/other"),
        identity("org/name", revision="main"),
        identity("org/name", tokenizer="org/other"),
    ]
    assert len(set(names)) == len(names)
    assert identity("org/name", tokenizer="org/name") == names[0]


def test_a_folder_that_cannot_be_read_is_an_error(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(ConfigError, match=r"^model\.tokenizer: .* a readable tokenizer\.json"):
        identity(folder)


def test_other_weights_of_the_same_model_have_another_fingerprint(
    folder: Path, tmp_path: Path
) -> None:
    def of(path: Path) -> str:
        return fingerprint(ModelConfig(path=str(path)))

    weights = folder / "model-00001.safetensors"
    weights.write_bytes(bytes(1 << 20))
    same, tuned, longer, more = (tmp_path / name for name in ("same", "tuned", "longer", "more"))
    for copy in (same, tuned, longer, more):
        shutil.copytree(folder, copy)
    (tuned / weights.name).write_bytes(bytes(1 << 19) + b"1" * (1 << 19))
    (longer / weights.name).write_bytes(bytes((1 << 20) + 1))
    (more / "model-00002.safetensors").write_bytes(b"")
    assert of(same) == of(folder)
    assert len({of(copy) for copy in (folder, tuned, longer, more)}) == 4
    assert identity(folder) == identity(tuned)


def test_a_model_that_transformers_does_not_know_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "none"}')
    with pytest.raises(ConfigError, match=r"^model\.path: .* a model that transformers reads"):
        text_sizes(parse({"model": {"path": str(folder)}}))
