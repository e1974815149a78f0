"""A model drafts the same tokens in a separate process and in vLLM's engine."""

from pathlib import Path

import pytest

from specserve.compare.prompts import load_prompts, load_tokenizer
from specserve.core.config import AppConfig
from specserve.engine.generation import Job, Sampling
from tests.integration.cluster import model_path
from tests.peers.bench_agreement import measure
from tests.peers.bench_drafters import blurred_copy, draft_model_contenders, mtp_contenders
from tests.peers.bench_engine import Contender

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 2


def contenders(config: AppConfig, source: str, target: Path) -> list[Contender]:
    """No speculation, our drafter, vLLM's drafter with our kernels, vLLM's drafter."""
    if source == "mtp":
        model = config.model.model_copy(update={"path": str(model_path("demo-base"))})
        return mtp_contenders(config.model_copy(update={"model": model}), NUM_TOKENS)
    draft_model = model_path("demo-draft")
    blurred_copy(draft_model, target, seed=0)
    return draft_model_contenders(config, draft_model, target, NUM_TOKENS)


@pytest.mark.parametrize("source", ["mtp", "draft_model"])
def test_drafts_agree_with_those_of_vllm(config: AppConfig, source: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(model_path("demo-base")))
    prompts = load_prompts("code", tokenizer, num_prompts=24, seed=0)
    jobs = {"code": [Job(prompt.token_ids, Sampling(max_tokens=48)) for prompt in prompts]}
    _, ours, theirs, _ = contenders(config, source, tmp_path / "target")
    both, *_ = measure(ours, theirs, jobs, NUM_TOKENS)
    assert both["places"] > 50
    # Both sides compute in float32, but our module gets the target's states in bfloat16.
    assert both["same_1"] >= 0.98
    assert both["same_2"] >= 0.98
    assert both["ours_right_1"] == pytest.approx(both["vllm_right_1"], abs=0.02)
    assert both["ours_right_2"] == pytest.approx(both["vllm_right_2"], abs=0.02)
    assert both["ours_right_2"] > 0.4  # bad drafts could agree too
