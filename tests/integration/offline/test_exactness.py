"""In float32 speculation writes exactly what the model writes without it."""

import pytest

from specserve.compare.engine_process import EngineProcess
from specserve.compare.prompts import load_prompts, load_tokenizer
from specserve.core.config import AppConfig
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.engine.generation import Job, Sampling
from tests.integration.cluster import model_path
from tests.integration.offline.conftest import running_engine


@pytest.fixture(scope="module")
def jobs(config: AppConfig) -> list[Job]:
    tokenizer = load_tokenizer(config.model.path)
    prompts = [
        prompt
        for name, number in (("code", 8), ("te", 4), ("tc", 4), ("chat", 4))
        for prompt in load_prompts(name, tokenizer, num_prompts=number)
    ]
    return [Job(prompt.token_ids, Sampling(max_tokens=100)) for prompt in prompts]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_output_with_drafts_is_the_output_without(
    none_engine: EngineProcess, ngram_engine: EngineProcess, jobs: list[Job], concurrency: int
) -> None:
    expected = none_engine.run(jobs, concurrency)
    got = ngram_engine.run(jobs, concurrency)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in expected.completions]
    assert [c.text for c in got.completions] == [c.text for c in expected.completions]
    assert expected.drafts == ()
    (drafts,) = got.drafts
    # Otherwise nothing was put to the test: neither taking a draft nor throwing one away.
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    # The two counts are taken in different places: the sources' own and the scheduler's.
    assert drafts.num_draft_tokens == sum(c.num_draft_tokens for c in got.completions)
    assert drafts.num_accepted_tokens == sum(c.num_accepted_tokens for c in got.completions)


def test_so_it_is_with_drafts_of_what_was_written_before(
    none_engine: EngineProcess, config: AppConfig, jobs: list[Job]
) -> None:
    expected = [c.token_ids for c in none_engine.run(jobs, 8).completions]
    with running_engine(config, "trie") as engine:
        first, again = engine.run(jobs, 8), engine.run(jobs, 8)
    assert [c.token_ids for c in first.completions] == expected
    assert [c.token_ids for c in again.completions] == expected
    (drafts,) = again.drafts
    assert drafts.source == "trie_local"
    assert sum(map(len, expected)) / 2 < drafts.num_accepted_tokens < drafts.num_draft_tokens


def test_so_it_is_with_latent_attention_and_experts(config: AppConfig, jobs: list[Job]) -> None:
    model = config.model.model_copy(update={"path": str(model_path("demo-base"))})
    base = config.model_copy(update={"model": model})
    with running_engine(base, "none") as engine:
        expected = engine.run(jobs, 4)
    with running_engine(base, "all") as engine:
        got = engine.run(jobs, 4)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in expected.completions]
    assert {drafts.source for drafts in got.drafts} == {"ngram", "trie_local"}
    for drafts in got.drafts:
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


def test_so_it_is_with_models_that_draft_in_processes_of_their_own(
    config: AppConfig, jobs: list[Job]
) -> None:
    model = config.model.model_copy(update={"path": str(model_path("demo-base"))})
    draft_model = DraftModelConfig(
        kind="draft_model", model=str(model_path("demo-draft")), dynamic=False
    )
    speculation = (MtpConfig(kind="mtp", max_draft_len=3, dynamic=False), draft_model)
    base = config.model_copy(update={"model": model, "speculation": speculation})
    with running_engine(base, "none") as engine:
        expected = engine.run(jobs, 4)
    with running_engine(base, "all") as engine:
        got = engine.run(jobs, 4)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in expected.completions]
    assert {drafts.source for drafts in got.drafts} == {"mtp", "draft_model"}
    for drafts in got.drafts:
        assert 0.4 * drafts.num_drafts < drafts.num_accepted_tokens < drafts.num_draft_tokens
