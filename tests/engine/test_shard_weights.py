"""What a shard writes, without shards. tests/integration tests the written folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from safetensors import SafetensorError
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import DefaultModelLoader, ShardedStateLoader

from specserve.core.config import parse
from specserve.core.errors import ConfigError, EngineError
from specserve.engine import shard_weights
from specserve.engine.shard_weights import _WritingLoader, write_shards


class Model(torch.nn.Module):
    """An embedding and a head that vLLM did not tie, because the checkpoint stores both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = layer(VocabParallelEmbedding), layer(ParallelLMHead)


def layer(kind: type[VocabParallelEmbedding]) -> VocabParallelEmbedding:
    new: VocabParallelEmbedding = object.__new__(kind)  # its constructor needs a group of shards
    torch.nn.Module.__init__(new)
    new.quant_method = UnquantizedEmbeddingMethod()
    new.weight = torch.nn.Parameter(torch.ones(4, 2))
    return new


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of the tensors that shards wrote."""
    written: list[set[str]] = []

    def save(model: torch.nn.Module, out: str, max_size: int) -> None:
        written.append(set(ShardedStateLoader._filter_subtensors(model.state_dict())))

    monkeypatch.setattr(DefaultModelLoader, "load_weights", lambda *_: None)
    monkeypatch.setattr(ShardedStateLoader, "save_model", save)
    return written


def write(model: Model, *, is_untied: bool = True) -> None:
    options: Any = {"model_loader_extra_config": {"out": "out"}}
    config: ModelConfig = SimpleNamespace(
        model="tied", word_embeddings_untied_by_checkpoint=is_untied
    )
    _WritingLoader(LoadConfig(**options)).load_weights(model, config)


def test_a_head_equal_to_the_embedding_is_written_once(written: list[set[str]]) -> None:
    write(Model())
    assert written == [{"embed_tokens.weight"}]


def test_a_tied_head_that_differs_from_the_embedding_is_refused(written: list[set[str]]) -> None:
    model = Model()
    model.lm_head.weight.data += 1
    with pytest.raises(ConfigError, match=r"^tie_word_embeddings: True is not allowed; allowed: f"):
        write(model)
    assert not written
    write(model, is_untied=False)
    assert written == [{"embed_tokens.weight", "lm_head.weight"}]


FULL = RayTaskError("load_model", "No space left on device", SafetensorError("no space"))


@pytest.mark.parametrize("error", [ActorDiedError(), FULL.as_instanceof_cause()])
def test_a_shard_that_dies_or_cannot_write_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def place(*_: object) -> None:
        raise error

    monkeypatch.setattr(shard_weights, "prepare_environment", lambda _: None)
    monkeypatch.setattr(shard_weights, "served_engine_args", lambda _: AsyncEngineArgs("m"))
    monkeypatch.setattr(shard_weights, "placed_config", place)
    group: Any = None
    with pytest.raises(EngineError, match=r"^the shards did not start: .+$"):
        write_shards(parse({"model": {"path": "m"}}), group, tmp_path)
