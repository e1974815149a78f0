"""A draft model that does not fit its target: the engine ends at once and gives the reason."""

import json
import shutil
import time
from pathlib import Path

import pytest

from specserve.core.config import AppConfig
from specserve.core.errors import EngineError
from specserve.core.source_config import DraftModelConfig
from specserve.engine.offline import SOURCES_TIMEOUT_S
from tests.integration.cluster import model_path
from tests.integration.offline.engines import running_engine


def refusal(config: AppConfig, model: Path) -> str:
    """The error of an engine that refuses this draft model, well before the timeout."""
    source = DraftModelConfig(kind="draft_model", model=str(model), max_texts=1)
    began = time.monotonic()
    with (
        pytest.raises(EngineError) as refused,
        running_engine(config.model_copy(update={"speculation": (source,)}), "draft_model"),
    ):
        pass
    assert time.monotonic() - began < SOURCES_TIMEOUT_S / 2
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the draft model that a test may change."""
    return Path(shutil.copytree(model_path("demo-draft"), tmp_path / "model"))


def test_a_draft_model_that_cannot_be_loaded_is_refused(config: AppConfig, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    said = refusal(config, folder)
    start = f"method draft_model: draft_model: the drafter did not start: model: '{folder}' is not"
    assert said.startswith(start)
    assert "\n" not in said


def test_a_draft_model_with_another_vocabulary_is_refused(config: AppConfig, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["another token"] = vocabulary.pop(max(vocabulary, key=vocabulary.get))
    tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = refusal(config, folder)
    assert said.startswith(f"method draft_model: draft_model: {folder} at tcp://127.0.0.1:")
    assert " has tokenizer " in said
