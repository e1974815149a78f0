"""The fingerprint of a vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from specserve.drafters.vocabulary import fingerprint

MODELS = Path(__file__).parents[2] / "configs/models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "demo-draft" / name, tmp_path)
    return tmp_path


def test_models_of_one_vocabulary_have_one_fingerprint() -> None:
    assert fingerprint(str(MODELS / "demo-draft")) == fingerprint(str(MODELS / "demo-base"))


def test_the_formatting_of_the_file_is_ignored(folder: Path) -> None:
    before = fingerprint(str(folder))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1, sort_keys=True))
    assert fingerprint(str(folder)) == before


def test_swapped_tokens_change_the_fingerprint(folder: Path) -> None:
    before = fingerprint(str(folder))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (4000, 4001)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    assert fingerprint(str(folder)) != before


def test_an_added_token_changes_the_fingerprint(folder: Path) -> None:
    before = fingerprint(str(folder))
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([AddedToken("<|tool|>")])
    tokenizer.save(file)
    assert fingerprint(str(folder)) != before


def test_an_invalid_config_leaves_the_vocabulary_unknown_and_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((MODELS / "demo-draft/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    (folder / "tokenizer_config.json").unlink()  # the class then comes from config.json
    assert fingerprint(str(folder)) == ""
    assert f"The vocabulary of {folder} is unknown and so not checked: " in caplog.text
    assert "'hidden_size'" in caplog.text


def test_a_damaged_tokenizer_leaves_the_vocabulary_unknown(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert fingerprint(str(folder)) == ""


def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", questions.append)
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    assert fingerprint(str(folder)) == ""
    assert not questions


def test_a_folder_without_a_tokenizer_has_no_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(MODELS / "demo-draft" / "config.json", tmp_path)
    assert fingerprint(str(tmp_path)) == ""
    assert f"The vocabulary of {tmp_path} is unknown" in caplog.text
