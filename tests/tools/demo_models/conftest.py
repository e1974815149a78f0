from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from specserve.compare.corpus import Module, load_modules
from tools.demo_models.shapes import BaseShape, DraftShape
from tools.demo_models.tokenizer import train_tokenizer

VOCAB_SIZE = 512


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    return [m for m in load_modules(held_out=True) if len(m.text) < 60_000]


@pytest.fixture(scope="session")
def tokenizer(modules: list[Module]) -> Tokenizer:
    return train_tokenizer([m.text for m in modules[:4]], VOCAB_SIZE)


@pytest.fixture(scope="session")
def base_shape() -> BaseShape:
    return BaseShape(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_attention_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=16,
        v_head_dim=8,
    )


@pytest.fixture(scope="session")
def draft_shape() -> DraftShape:
    return DraftShape(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        head_dim=16,
    )


@pytest.fixture
def corpus(tmp_path: Path, modules: list[Module]) -> Path:
    """A folder with enough small modules for both parts of the split."""
    root = tmp_path / "corpus"
    root.mkdir()
    small = [m for m in modules if 8_000 < len(m.text) < 20_000]
    for i in range(60):
        (root / f"module_{i}.py").write_text(small[i % len(small)].text)
    return root
