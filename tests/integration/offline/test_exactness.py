"""In float32 the output with speculation is exactly the output without it."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from specserve.compare.engine_process import EngineProcess
from specserve.compare.prompts import load_prompts, load_tokenizer
from specserve.core.config import AppConfig
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.engine.cpu.compilation import missing_for_compilation
from specserve.engine.generation import Completion, Job, RunResult, Sampling
from tests.integration.cluster import model_path
from tests.integration.offline.engines import running_engine
from tests.peers.schemas import SCHEMAS

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def jobs(config: AppConfig) -> list[Job]:
    tokenizer = load_tokenizer(config.model.path)
    prompts = [
        prompt
        for name, number in (("code", 3), ("te", 2), ("tc", 1), ("chat", 2))
        for prompt in load_prompts(name, tokenizer, num_prompts=number)
    ]
    return [Job(prompt.token_ids, Sampling(max_tokens=64)) for prompt in prompts]


@pytest.fixture(scope="module")
def drafting_engine(config: AppConfig) -> Iterator[EngineProcess]:
    """An engine with prompt lookup and a memory of earlier texts."""
    with running_engine(config, "all") as engine:
        yield engine


@pytest.fixture(scope="module")
def prediction_grammar_engine(config: AppConfig) -> Iterator[EngineProcess]:
    """An engine with the sources that draft from a request's prediction or schema."""
    with running_engine(config, "prediction+grammar") as engine:
        yield engine


def assert_same(got: RunResult, expected: RunResult) -> None:
    """Asserts equal texts, some accepted draft tokens, and equal counts of vLLM and the sources."""
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in expected.completions]
    assert [c.text for c in got.completions] == [c.text for c in expected.completions]
    drafted = sum(drafts.num_draft_tokens for drafts in got.drafts)
    accepted = sum(drafts.num_accepted_tokens for drafts in got.drafts)
    assert 0 < accepted <= drafted
    assert drafted == sum(c.num_draft_tokens for c in got.completions)
    assert accepted == sum(c.num_accepted_tokens for c in got.completions)


def accepting(*runs: RunResult) -> set[str]:
    """Sources with accepted tokens."""
    return {drafts.source for run in runs for drafts in run.drafts if drafts.num_accepted_tokens}


def test_greedy_output_is_the_same_with_and_without_drafts(
    none_engine: EngineProcess, drafting_engine: EngineProcess, jobs: list[Job]
) -> None:
    expected = none_engine.run(jobs, 8)
    assert expected.drafts == ()
    first, again = (drafting_engine.run(jobs, concurrency) for concurrency in (1, 8))
    assert_same(first, expected)
    assert_same(again, expected)
    assert accepting(first, again) == {"ngram", "trie_local"}
    assert any(d.num_accepted_tokens < d.num_draft_tokens for d in first.drafts)
    # In the second run the memory holds the texts.
    accepted = sum(drafts.num_accepted_tokens for drafts in again.drafts)
    assert accepted > sum(len(c.token_ids) for c in expected.completions) / 2


def test_output_is_the_same_with_nearly_right_predictions(
    none_engine: EngineProcess, prediction_grammar_engine: EngineProcess, jobs: list[Job]
) -> None:
    expected = none_engine.run(jobs, 8)
    answers = [completion.token_ids for completion in expected.completions]
    texts = [tuple(each for i, each in enumerate(answer) if i % 9) for answer in answers]
    predicted = [
        replace(job, sampling=replace(job.sampling, prediction=text))
        for job, text in zip(jobs, texts, strict=True)
    ]
    for concurrency in (1, 8):
        got = prediction_grammar_engine.run(predicted, concurrency)
        assert_same(got, expected)
        assert accepting(got) == {"prediction"}


def test_a_predicted_answer_can_end_in_the_step_that_reads_its_prompt(
    none_engine: EngineProcess, prediction_grammar_engine: EngineProcess, jobs: list[Job]
) -> None:
    short = [replace(job, sampling=replace(job.sampling, max_tokens=5)) for job in jobs]
    expected = none_engine.run(short, 8)
    predicted = [
        replace(job, sampling=replace(job.sampling, prediction=completion.token_ids))
        for job, completion in zip(short, expected.completions, strict=True)
    ]
    got = prediction_grammar_engine.run(predicted, 1)
    assert_same(got, expected)
    assert [each.num_accepted_tokens for each in got.completions] == [4] * len(jobs)
    assert [each.num_drafts for each in got.drafts] == [len(jobs)]


def test_output_is_the_same_with_drafts_from_a_schema(
    config: AppConfig, none_engine: EngineProcess, prediction_grammar_engine: EngineProcess
) -> None:
    tokenizer = load_tokenizer(config.model.path)
    schemas = [json.dumps(schema) for schema in SCHEMAS.values()]
    jobs = [
        Job(
            tuple(tokenizer.encode(each, add_special_tokens=False)),
            Sampling(max_tokens=128, json_schema=each),
        )
        for each in schemas
    ]
    expected = none_engine.run(jobs, 4)
    for concurrency in (1, 4):
        got = prediction_grammar_engine.run(jobs, concurrency)
        assert_same(got, expected)
        assert accepting(got) == {"grammar"}


@pytest.mark.parametrize("is_latent", [False, True], ids=["compiled", "latent"])
def test_output_is_the_same_with_experts_and_drafter_processes(
    config: AppConfig, jobs: list[Job], monkeypatch: pytest.MonkeyPatch, is_latent: bool
) -> None:
    if not is_latent and (missing := missing_for_compilation()):
        pytest.skip(missing)
    monkeypatch.setenv("VLLM_MLA_DISABLE", f"{int(not is_latent)}")
    model = config.model.model_copy(update={"path": str(model_path("demo-base"))})
    draft_model = DraftModelConfig(
        kind="draft_model", model=str(model_path("demo-draft")), dynamic=False, timeout_s=10.0
    )
    mtp = MtpConfig(kind="mtp", max_draft_len=3, dynamic=False, timeout_s=10.0)
    speculation = (*config.speculation, mtp, draft_model)
    base = config.model_copy(update={"model": model, "speculation": speculation})
    with running_engine(base, "none") as engine:  # in eager mode in both cases
        expected = engine.run(jobs, 4)
    options = config.engine.model_copy(update={"enforce_eager": is_latent})
    with running_engine(base.model_copy(update={"engine": options}), "all") as engine:
        got = engine.run(jobs, 4)
    assert_same(got, expected)
    assert accepting(got) >= {"mtp", "draft_model"}


def test_texts_stream_and_each_completion_counts_its_drafts_by_source(
    drafting_engine: EngineProcess, jobs: list[Job]
) -> None:
    texts = [""] * len(jobs)
    done: dict[int, Completion] = {}

    def show(index: int, text: str, completion: Completion | None) -> None:
        assert index not in done
        texts[index] += text
        if completion:
            done[index] = completion

    result = drafting_engine.run(jobs, 4, show=show)
    assert texts == [each.text for each in result.completions]
    assert tuple(done[index] for index in range(len(jobs))) == result.completions
    for drafts in result.drafts:
        counts = [each.sources[drafts.source] for each in result.completions]
        assert sum(each["drafted_tokens"] for each in counts) == drafts.num_draft_tokens
        assert sum(each["accepted_tokens"] for each in counts) == drafts.num_accepted_tokens


def test_ctrl_c_ends_the_jobs_and_the_engine_stays_usable(
    drafting_engine: EngineProcess, jobs: list[Job]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    endless = replace(jobs[0].sampling, max_tokens=400, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        drafting_engine.run([replace(jobs[0], sampling=endless)], 1, show=interrupt)
    expected = drafting_engine.run(jobs[1:2], 1)
    assert [len(each.token_ids) for each in expected.completions] == [64]
