"""Speculation does not change the output of a quantized base, except at near ties of bfloat16."""

import pytest

from specserve.compare.lossless import BF16_TOLERANCE, judge
from specserve.compare.prompts import load_prompts, load_tokenizer
from specserve.core.config import AppConfig
from specserve.engine.generation import Job, Sampling
from tests.integration.cluster import model_path
from tests.integration.offline.engines import running_engine
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(900)

QUANTIZATIONS = ("fp8_per_block", "int8_per_channel_weight_only")


def quantized(config: AppConfig, quantization: str) -> AppConfig:
    """The demo base, which has quantizable linear layers and experts."""
    model = config.model.model_copy(update={"path": str(model_path("demo-base"))})
    options = {"dtype": "bfloat16", "vllm": {"quantization": quantization}}
    engine = config.engine.model_copy(update=options)
    return config.model_copy(update={"model": model, "engine": engine})


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_base_writes_the_same_with_drafts(
    stage: Stage, nodes: Stage, config: AppConfig, quantization: str
) -> None:
    stage.end()
    nodes.clear()
    base = quantized(config, quantization)
    prompts = load_prompts("code", load_tokenizer(base.model.path), num_prompts=3)
    jobs = [Job(prompt.token_ids, Sampling(max_tokens=32)) for prompt in prompts]
    with running_engine(base, "all") as engine:
        got = engine.run(jobs, 1)
    assert sum(drafts.num_accepted_tokens for drafts in got.drafts) > 0
    with running_engine(base, "none") as engine:
        verdict = judge(
            [job.prompt_token_ids for job in jobs],
            engine.run(jobs, 1).completions,
            got.completions,
            score=lambda scored: engine.run(scored, 1),
            tolerance=BF16_TOLERANCE,
        )
    assert verdict.is_lossless, verdict
