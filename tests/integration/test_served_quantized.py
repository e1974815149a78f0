"""A quantized base over HTTP: a request gets the same text with and without drafts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specserve.compare.lossless import BF16_TOLERANCE, Verdict, judge
from specserve.engine.generation import Completion, Job, RunResult
from tests.integration.api import OFF, Api
from tests.integration.applications import application
from tests.integration.cluster import model_path
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(900)

FUNCTION = "def area(width, height):\n    return width * height\n\n\n"
PROMPTS = [3 * FUNCTION, "import os\nimport sys\n" * 4, "class Shape:\n"]
NUM_TOKENS = 48


def completion(api: Api, prompt: list[int], *, num_tokens: int, **body: object) -> Completion:
    """A completion with its tokens, and with log-probabilities if requested."""
    asked = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **body}
    answer = api.complete(**asked, return_token_ids=True, return_tokens_as_token_ids=True)
    (choice,) = answer["choices"]
    # Each token is named "token_id:ID".
    logprobs = [
        {int(token.partition(":")[2]): logprob for token, logprob in each.items()}
        for each in (choice["logprobs"] or {"top_logprobs": []})["top_logprobs"]
    ]
    return Completion(
        text=choice["text"],
        token_ids=tuple(choice["token_ids"]),
        finish_reason=choice["finish_reason"],
        seconds=0.0,
        token_seconds=(),
        logprobs=tuple(logprobs),
    )


def scores(api: Api, jobs: list[Job]) -> RunResult:
    """Log-probabilities of the tokens to score, without drafts."""
    answers = [
        completion(
            api,
            list(job.prompt_token_ids),
            num_tokens=1,
            logprobs=1,
            logprob_token_ids=list(job.sampling.score_token_ids),
            vllm_xargs=OFF,
        )
        for job in jobs
    ]
    return RunResult(completions=tuple(answers), seconds=0.0, drafts=())


def test_drafts_change_no_text_of_a_quantized_base(stage: Stage) -> None:
    args = application(
        model={"path": str(model_path("demo-base"))},
        engine={"dtype": "bfloat16", "vllm": {"quantization": "fp8_per_block"}},
    )
    app = stage.serve({"/": args})
    app.await_ready()
    api = Api(app.base_url())
    with api.http:
        prompts = [api.ask("/tokenize", prompt=prompt)["tokens"] for prompt in PROMPTS]
        asked = [{"prompt": prompt, "num_tokens": NUM_TOKENS} for prompt in prompts]
        before = api.counts()
        drafted = [completion(api, **each) for each in asked]
        counted = api.counts().since(before)
        plain = [completion(api, **each, vllm_xargs=OFF) for each in asked]
        assert api.counts().since(before) == counted
        assert counted.accepted_tokens > 0

        def judged(outputs: list[Completion]) -> Verdict:
            return judge(
                prompts,
                plain,
                outputs,
                score=lambda jobs: scores(api, jobs),
                tolerance=BF16_TOLERANCE,
            )

        verdict = judged(drafted)
        assert verdict.is_lossless, verdict
        written = plain[0].token_ids
        wrong = replace(plain[0], token_ids=(written[0] ^ 1, *written[1:]))
        (failure,) = judged([wrong, *plain[1:]]).failures
        assert BF16_TOLERANCE < failure.gap < math.inf
