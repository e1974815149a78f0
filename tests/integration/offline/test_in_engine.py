"""vLLM's draft model inside the engine, with requests that ask for different log-probabilities."""

import pytest

from specserve.compare.engine_process import EngineProcess
from specserve.core.config import AppConfig, parse
from specserve.engine.generation import Job, Sampling
from tests.integration.cluster import model_path
from tests.integration.offline.engines import running_engine
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(900)

PROMPT = (5, 6, 7, 8)
ASKED = (9, 10, 11)


def test_requests_with_and_without_logprobs_share_steps_with_drafts(
    stage: Stage, nodes: Stage, config: AppConfig, none_engine: EngineProcess
) -> None:
    jobs = [
        Job(PROMPT, Sampling(max_tokens=12, score_token_ids=ASKED)),
        Job(PROMPT[1:], Sampling(max_tokens=12, num_logprobs=2)),
        Job(PROMPT[2:], Sampling(max_tokens=12)),
    ]
    alone = none_engine.run(jobs, 1).completions
    stage.end()
    nodes.clear()
    drafter = {
        "kind": "draft_model",
        "model": str(model_path("demo-draft")),
        "placement": "in_engine",
        "max_draft_len": 3,
    }
    in_engine = parse(config.model_dump(mode="json") | {"speculation": [drafter]})
    with running_engine(in_engine, "all") as engine:
        result = engine.run(jobs, len(jobs))
    assert sum(drafts.num_accepted_tokens for drafts in result.drafts) > 0
    for got, expected in zip(result.completions, alone, strict=True):
        assert got.token_ids == expected.token_ids
        for position, wanted in zip(got.logprobs, expected.logprobs, strict=True):
            assert position.keys() == wanted.keys()
            assert all(abs(position[token] - wanted[token]) < 1e-3 for token in wanted)
