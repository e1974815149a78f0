"""The bridge between vLLM's model runner and the draft sources, without an engine around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from specserve.core.config import AppConfig, parse
from specserve.core.metrics import SpeculationSnapshot
from specserve.core.recent import RecentRequest, Tokens
from specserve.core.source_config import PredictionConfig
from specserve.core.types import DraftBatch, HiddenStates
from specserve.engine.hook import ProposerHook
from specserve.engine.tenants import tenant_fields
from specserve.policy.chain import Chain
from specserve.sources.prediction import PredictionSource

MAX_MODEL_LEN = 64
REPEATING = [1, 2, 3, 4] * 4


class Runner:
    """The part of vLLM's model runner that the hook uses."""

    def __init__(self, **texts: list[int]) -> None:
        self.effective_drafter_max_model_len = MAX_MODEL_LEN
        self.model_config = SimpleNamespace(has_inner_state=False, is_hybrid=False)
        self.requests = {name: _request() for name in texts}
        self.input_batch = SimpleNamespace(
            req_ids=list(texts),
            token_ids_cpu=np.zeros((20, MAX_MODEL_LEN), np.int32),
            num_tokens_no_spec=np.zeros(20, np.int32),
            num_prompt_tokens=np.full(20, 4, np.int32),
            num_computed_tokens_cpu=np.zeros(20, np.int32),
        )
        for row, text in enumerate(texts.values()):
            self.input_batch.token_ids_cpu[row, : len(text)] = text
            self.input_batch.num_tokens_no_spec[row] = len(text)


def _request(**params: Any) -> SimpleNamespace:
    fields = {"min_p": 0.0, "logit_bias": None, "extra_args": None, "max_tokens": None}
    fields |= {"min_tokens": 0, "thinking_token_budget": None}
    fields |= {"stop_token_ids": [], "eos_token_id": None, "structured_outputs": None} | params
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**fields),
        lora_request=None,
        prompt_token_ids=[1],
        prompt_embeds=None,
        mm_features=[],
    )


def _scheduled(runner: Runner, **drafts: list[int]) -> SimpleNamespace:
    tokens = {name: 1 + len(drafts.get(name, [])) for name in runner.input_batch.req_ids}
    return SimpleNamespace(
        scheduled_spec_decode_tokens=drafts,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        finished_req_ids=set(),
    )


def _step(
    hook: ProposerHook, runner: Runner, sampled: list[list[int]], **drafts: list[int]
) -> list[list[int]]:
    scheduled = _scheduled(runner, **drafts)
    hidden = torch.ones(scheduled.total_num_scheduled_tokens + 2, 2)  # CUDA graphs pad it
    return hook.propose_draft_token_ids(scheduled, sampled, None, hidden)


def _append(runner: Runner, row: int, tokens: list[int]) -> None:
    batch = runner.input_batch
    start = int(batch.num_tokens_no_spec[row])
    batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
    batch.num_tokens_no_spec[row] = start + len(tokens)


def _snapshot(hook: ProposerHook) -> SpeculationSnapshot:
    return msgspec.json.decode(hook.snapshot(), type=SpeculationSnapshot)


@pytest.fixture
def config() -> AppConfig:
    source = {"kind": "ngram", "max_draft_len": 4, "dynamic": False}
    return parse({"model": {"path": "m"}, "speculation": [source]})


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the model an identity without files."""
    monkeypatch.setattr("specserve.engine.source_context.model_identity", lambda _: "a model")


def hook_of(config: AppConfig, draft_metrics: str = "none") -> ProposerHook:
    vllm_config: Any = SimpleNamespace(
        additional_config={"specserve": config.model_dump(mode="json")},
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN, get_vocab_size=lambda: 100),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        observability_config=SimpleNamespace(per_request_spec_decode_metrics=draft_metrics),
        lora_config=SimpleNamespace(max_cpu_loras=1),
    )
    return ProposerHook(vllm_config)


@pytest.fixture
def hook(config: AppConfig) -> ProposerHook:
    return hook_of(config)


def test_a_repeating_text_gets_a_draft_and_its_acceptance_is_counted(hook: ProposerHook) -> None:
    runner = Runner(a=REPEATING)
    hook.attach(runner)

    assert _step(hook, runner, [[4]]) == [[1, 2, 3, 4]]
    _append(runner, 0, [1, 2, 9])
    _step(hook, runner, [[1, 2, 9]], a=[1, 2, 3, 4])

    (acceptance,) = _snapshot(hook).acceptance
    assert acceptance.num_draft_tokens == 4
    assert acceptance.accepted_at_position == (1, 1, 0, 0)


def test_a_new_request_gets_a_draft_before_its_first_step(hook: ProposerHook) -> None:
    hook.attach(Runner())
    request = _request()
    request.req_id, request.prompt_token_ids = "a", REPEATING
    assert hook.draft_first([request], 1) == [[1, 2, 3, 4]]

    runner = hook._runner = Runner(a=[*REPEATING, 1, 2, 3])
    runner.input_batch.num_prompt_tokens[0] = len(REPEATING)
    assert _step(hook, runner, [[1, 2, 3]], a=[1, 2, 3, 4]) == [[4, 1, 2, 3]]
    (acceptance,) = _snapshot(hook).acceptance
    assert acceptance.num_draft_tokens == 4
    assert acceptance.accepted_at_position == (1, 1, 0, 0)


def test_after_an_unexpected_error_requests_go_on_without_drafts(
    hook: ProposerHook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("a defect")

    runner = Runner(a=REPEATING, b=[5])
    hook.attach(runner)
    with monkeypatch.context() as defect:
        defect.setattr(Chain, "observe", fail)
        assert _step(hook, runner, [[4], [5]]) == [[], []]
    assert "IndexError: a defect" in caplog.text
    (source,) = _snapshot(hook).health
    assert (source.up, source.num_errors) == (False, 1)
    assert source.reason == "drafting ended: IndexError, see the log"

    request = _request()
    request.req_id, request.prompt_token_ids = "c", REPEATING
    assert hook.draft_first([request], 3) == [[]]
    scheduled = _scheduled(runner)
    assert not hook.is_idle(scheduled)
    hook.forget(["a"])
    assert _step(hook, runner, [[4], [5]]) == [[], []]
    assert hook.take_outcomes() == {}
    assert len(caplog.records) == 1


def _recent(hook: ProposerHook) -> tuple[RecentRequest[Tokens], ...]:
    return msgspec.json.decode(hook.recent_requests(""), type=tuple[RecentRequest[Tokens], ...])


def test_recent_steps_have_no_text_unless_configured(hook: ProposerHook) -> None:
    runner = Runner(a=REPEATING)
    hook.attach(runner)
    _step(hook, runner, [[4]])
    _append(runner, 0, [1, 2, 9])
    _step(hook, runner, [[1, 2, 9]], a=[1, 2, 3, 4])
    hook.forget(["a"])

    (request,) = _recent(hook)
    steps = [(step.source, step.num_drafted, step.num_accepted) for step in request.steps]
    assert steps == [("", 0, 0), ("ngram", 4, 2)]
    assert {step.accepted + step.own + step.refused for step in request.steps} == {()}


def test_steps_of_a_request_with_learn_off_are_not_recorded(hook: ProposerHook) -> None:
    runner = Runner(a=REPEATING)
    runner.requests["a"] = _request(extra_args={"learn": 0})
    hook.attach(runner)
    _step(hook, runner, [[4]])

    assert _recent(hook) == ()


def test_a_draft_that_the_scheduler_cut_is_counted_as_cut(hook: ProposerHook) -> None:
    runner = Runner(a=REPEATING)
    hook.attach(runner)

    _step(hook, runner, [[4]])
    _append(runner, 0, [1, 2, 9])
    _step(hook, runner, [[1, 2, 9]], a=[1, 2])

    (acceptance,) = _snapshot(hook).acceptance
    assert acceptance.num_draft_tokens == 2
    assert acceptance.num_accepted_tokens == 2


def test_outcomes_are_returned_once_and_only_for_requests_that_ask(hook: ProposerHook) -> None:
    runner = Runner(a=REPEATING, b=REPEATING)
    runner.requests["a"] = _request(extra_args={"report": 1})
    hook.attach(runner)
    _step(hook, runner, [[4], [4]])
    assert hook.take_outcomes() == {}  # nothing was verified
    for row in (0, 1):
        _append(runner, row, [1, 2, 9])
    _step(hook, runner, [[1, 2, 9], [1, 2, 9]], a=[1, 2, 3, 4], b=[1, 2, 3, 4])
    assert hook.take_outcomes() == {"a": ("ngram", 4, 2)}
    assert hook.take_outcomes() == {}
    hook.forget(["a"])
    assert not hook._reporting


def test_every_request_reports_its_outcomes_if_the_engine_is_to_report_them(
    config: AppConfig,
) -> None:
    hook = hook_of(config, "api")
    runner = Runner(a=REPEATING)
    hook.attach(runner)
    _step(hook, runner, [[4]])
    _append(runner, 0, [1, 2, 9])
    _step(hook, runner, [[1, 2, 9]], a=[1, 2, 3, 4])
    assert hook.take_outcomes() == {"a": ("ngram", 4, 2)}


def test_a_draft_is_kept_for_a_request_that_was_not_scheduled(hook: ProposerHook) -> None:
    runner = Runner(a=REPEATING, b=[5, 6, 7, 8])
    hook.attach(runner)
    _step(hook, runner, [[4], [8]])

    both = runner.input_batch
    runner.input_batch = Runner(b=[5, 6, 7, 8, 9]).input_batch
    _step(hook, runner, [[9]])
    runner.input_batch = both
    _append(runner, 0, [1, 2, 3, 4, 1])
    _step(hook, runner, [[1, 2, 3, 4, 1], [9]], a=[1, 2, 3, 4])

    (acceptance,) = _snapshot(hook).acceptance
    assert acceptance.num_accepted_tokens == 4


@pytest.mark.parametrize(("max_tokens", "draft"), [(12, []), (15, [1, 2]), (40, [1, 2, 3, 4])])
def test_a_draft_ends_at_the_requests_max_tokens(
    hook: ProposerHook, max_tokens: int, draft: list[int]
) -> None:
    runner = Runner(a=REPEATING)  # 4 prompt and 12 output tokens
    runner.requests["a"] = _request(max_tokens=max_tokens)
    hook.attach(runner)
    assert _step(hook, runner, [[4]]) == [draft]


@pytest.mark.parametrize(
    ("params", "draft"),
    [
        ({"eos_token_id": 3}, [1, 2]),
        ({"eos_token_id": 9, "stop_token_ids": [8, 2]}, [1]),
        ({"stop_token_ids": [1]}, []),
        ({"eos_token_id": None}, [1, 2, 3, 4]),
        ({"structured_outputs": object(), "all_stop_token_ids": {3}}, [1, 2]),
    ],
)
def test_a_draft_ends_before_a_token_that_ends_the_request(
    hook: ProposerHook, params: dict[str, Any], draft: list[int]
) -> None:
    runner = Runner(a=REPEATING)
    runner.requests["a"] = _request(**params)
    hook.attach(runner)
    assert _step(hook, runner, [[4]]) == [draft]


@pytest.mark.parametrize(
    ("min_tokens", "draft"),
    [(12, [1, 2, 3, 4]), (13, []), (15, [1, 2]), (17, [1, 2, 3, 4]), (40, [1, 2, 3, 4])],
)
def test_a_draft_does_not_cross_min_tokens(
    hook: ProposerHook, min_tokens: int, draft: list[int]
) -> None:
    runner = Runner(a=REPEATING)  # 4 prompt and 12 output tokens
    runner.requests["a"] = _request(min_tokens=min_tokens)
    hook.attach(runner)
    assert _step(hook, runner, [[4]]) == [draft]


def test_a_draft_never_runs_past_the_context(hook: ProposerHook) -> None:
    text = ([1, 2, 3, 4] * 16)[: MAX_MODEL_LEN - 3]
    runner = Runner(a=text, b=REPEATING)
    hook.attach(runner)

    drafts = _step(hook, runner, [[text[-1]], [4]])

    assert [len(draft) for draft in drafts] == [2, 4]


def test_one_request_at_the_context_limit_does_not_stop_the_others(hook: ProposerHook) -> None:
    runner = Runner(a=([1, 2, 3, 4] * 16)[: MAX_MODEL_LEN - 1], b=REPEATING)
    hook.attach(runner)

    assert _step(hook, runner, [[3], [4]]) == [[], [1, 2, 3, 4]]
    assert runner.effective_drafter_max_model_len >= MAX_MODEL_LEN + 4


def test_a_request_in_prefill_gets_no_draft(hook: ProposerHook) -> None:
    runner = Runner(a=REPEATING)
    hook.attach(runner)

    assert _step(hook, runner, [[]]) == [[]]


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.1},
        {"logit_bias": {3: 5.0}},
        {"thinking_token_budget": 0},
        {"extra_args": {"speculation": "off"}},
    ],
)
def test_requests_that_do_not_allow_drafts_get_none(
    hook: ProposerHook, params: dict[str, Any]
) -> None:
    runner = Runner(a=REPEATING, b=REPEATING)
    runner.requests["a"] = _request(**params)
    hook.attach(runner)

    assert _step(hook, runner, [[4], [4]]) == [[], [1, 2, 3, 4]]


def test_unchecked_invalid_controls_do_not_fail_the_request(
    hook: ProposerHook,
) -> None:
    runner = Runner(a=REPEATING)
    runner.requests["a"] = _request(extra_args={"speculation": "nonsense"})
    hook.attach(runner)

    assert _step(hook, runner, [[4]]) == [[1, 2, 3, 4]]


def test_a_request_id_can_be_reused_after_forget(hook: ProposerHook) -> None:
    runner = Runner(a=REPEATING)
    runner.requests["a"] = _request(extra_args={"speculation": "off"})
    hook.attach(runner)
    assert _step(hook, runner, [[4]]) == [[]]

    hook.forget(["a"])
    runner.requests["a"] = _request()

    assert _step(hook, runner, [[4]]) == [[1, 2, 3, 4]]


def test_an_aborted_request_leaves_no_prediction_in_memory(
    config: AppConfig,
) -> None:
    predicting = PredictionConfig(kind="prediction", dynamic=False)
    hook = hook_of(config.model_copy(update={"speculation": (predicting,)}))
    runner = Runner(a=REPEATING, b=REPEATING)
    predicted = np.arange(50, 60, dtype=np.int32)
    for name in ("a", "b"):
        runner.requests[name] = _request(extra_args={"prediction": predicted.tobytes()})
    hook.attach(runner)
    (source,) = (each.member.source for each in hook._chain._sources)
    assert isinstance(source, PredictionSource)
    _append(runner, 0, [50])
    assert _step(hook, runner, [[50], [4]])[0] == predicted[1:].tolist()

    hook.forget(["a"])
    assert sum(each is not None for each in source._texts) == 1
    runner.requests["a"] = _request()
    assert _step(hook, runner, [[50], [4]])[0] == []

    hook.forget(["a", "b"])
    assert all(each is None for each in source._texts)


def test_without_our_worker_the_hooks_error_names_worker_cls(hook: ProposerHook) -> None:
    with pytest.raises(AssertionError, match="worker_cls"):
        hook.propose([[1]], None, None)


def test_hidden_states_have_the_first_position_of_each_request(
    hook: ProposerHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(a=REPEATING, b=REPEATING)
    runner.input_batch.num_computed_tokens_cpu[:2] = [11, 15]
    hook.attach(runner)
    hook._feeds_drafters = True
    seen: list[HiddenStates | None] = []
    step = hook._chain.step

    def watch(batch: DraftBatch, num_steps: int) -> list[list[int]]:
        seen.append(batch.hidden_states)
        return step(batch, num_steps)

    monkeypatch.setattr(hook._chain, "step", watch)
    _step(hook, runner, [[1, 2, 3, 4], [4]], a=[1, 2, 3, 4])

    (states,) = seen
    assert states is not None
    assert states.starts.tolist() == [11, 15]
    assert states.num_tokens.tolist() == [5, 1]
    for rows, count in (([0, 1], 6), ([1], 1), ([], 0)):
        values = states.to_host(np.array(rows, np.int64))()
        assert values.dtype == np.uint16
        assert values.tolist() == [[0x3F80, 0x3F80]] * count


def test_a_finished_text_goes_to_sources_that_have_not_seen_all_of_it(
    hook: ProposerHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(a=REPEATING, b=[5, 6, 7, 8])
    hook.attach(runner)
    _step(hook, runner, [[4], [8]])
    seen: list[DraftBatch] = []
    monkeypatch.setattr(hook._chain, "finish", seen.append)

    hook.forget({"b", "long gone"})

    (texts,) = seen
    assert texts.slots.tolist() == [1]
    assert texts.token_ids.tolist() == [[5, 6, 7, 8]]
    assert texts.num_tokens.tolist() == [4]
    assert all(each.flags.carray for each in texts[:4])  # as the kernels require


def test_a_step_without_a_due_source_only_passes_on_the_outcomes(
    hook: ProposerHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(a=REPEATING)
    hook.attach(runner)
    assert _step(hook, runner, [[4]]) == [[1, 2, 3, 4]]
    monkeypatch.setattr("specserve.policy.asking.AskPolicy.is_due", lambda *_: False)
    _append(runner, 0, [1, 2, 9])

    assert _step(hook, runner, [[1, 2, 9]], a=[1, 2, 3, 4]) == [[]]

    (acceptance,) = _snapshot(hook).acceptance
    assert acceptance.accepted_at_position == (1, 1, 0, 0)


@pytest.fixture
def resting(hook: ProposerHook, monkeypatch: pytest.MonkeyPatch) -> ProposerHook:
    """A hook whose sources are due at every fourth step, as long as they have no draft."""
    monkeypatch.setattr(Chain, "num_idle_steps", lambda *_: 3)
    return hook


def test_steps_of_the_same_requests_are_idle_until_a_source_is_due(
    resting: ProposerHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(a=[5, 6, 7, 8], b=[9, 8, 7, 6])
    resting.attach(runner)
    asked_after: list[int] = []

    def step(batch: DraftBatch, num_steps: int) -> list[list[int]]:
        asked_after.append(num_steps)
        return [[], []]

    monkeypatch.setattr(resting._chain, "step", step)
    assert not resting.is_idle(_scheduled(runner))  # nothing is known yet
    _step(resting, runner, [[1], [2]])
    for _ in range(3):
        assert resting.is_idle(_scheduled(runner))
        resting.note_idle_step([[3], [4]])
    assert not resting.is_idle(_scheduled(runner))
    _step(resting, runner, [[5], [6]])
    assert asked_after == [1, 4]

    first, second = _recent(resting)
    assert [len(each.steps) for each in (first, second)] == [5, 5]


def test_a_step_with_another_request_is_not_idle(resting: ProposerHook) -> None:
    runner = Runner(a=[5, 6, 7, 8], b=[9, 8, 7, 6])
    resting.attach(runner)
    _step(resting, runner, [[1], [2]])
    assert not resting.is_idle(_scheduled(Runner(a=[5], c=[6])))
    assert not resting.is_idle(_scheduled(Runner(a=[5])))
    assert not resting.is_idle(_scheduled(runner, a=[1, 2]))
    assert resting.is_idle(_scheduled(runner))


def test_no_step_is_idle_with_recurrent_layers(resting: ProposerHook) -> None:
    runner = Runner(a=[5, 6, 7, 8])
    runner.model_config.is_hybrid = True
    resting.attach(runner)
    _step(resting, runner, [[1]])
    assert not resting.is_idle(_scheduled(runner))


def test_the_time_of_a_step_excludes_the_idle_steps_before_it(
    resting: ProposerHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(a=[5, 6, 7, 8])
    resting.attach(runner)
    times = iter([10.0, 11.0, 11.5, 11.6])
    monkeypatch.setattr("specserve.engine.hook.time.perf_counter", lambda: next(times))
    seen: list[float] = []
    monkeypatch.setattr(resting._chain, "step", lambda *_: [[]])
    monkeypatch.setattr(resting._chain.cost, "observe", lambda *observed: seen.append(observed[2]))
    _step(resting, runner, [[1]])
    resting.note_idle_step([[3]])
    _step(resting, runner, [[5]])
    assert seen == [0.5]


def test_the_cost_is_of_steps_without_prefill(
    hook: ProposerHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(a=REPEATING, b=REPEATING)
    hook.attach(runner)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(hook._chain.cost, "observe", lambda *observed: seen.append(observed[:2]))
    _step(hook, runner, [[4], [4]])
    for num_prefill_tokens in (0, 1, 0):
        scheduled = _scheduled(runner, a=[1, 2, 3, 4])
        scheduled.total_num_scheduled_tokens += num_prefill_tokens
        hook.propose_draft_token_ids(scheduled, [[1], [4]], None, None)
    assert seen == [(2, 4), (2, 4)]


def with_memory(*tenants: str) -> ProposerHook:
    """A hook whose source is a trie, where these tenants have keys."""
    keys = [{"env": f"{name}_KEY", "tenant": name} for name in tenants]
    trie = {"kind": "trie", "dynamic": False, "max_bytes": 1 << 20, "max_draft_len": 4}
    return hook_of(
        parse({"model": {"path": "m"}, "speculation": [trie], "http": {"api_keys": keys}})
    )


TEXT = [11, 12, 13, 14, 15, 16, 17, 18]


def drafted_after(hook: ProposerHook, text: list[int], **extra_args: object) -> list[int]:
    runner = Runner(a=text)
    runner.requests["a"] = _request(extra_args=extra_args)
    hook.attach(runner)
    hook.learn(TEXT, 4, extra_args)
    (draft,) = _step(hook, runner, [[text[-1]]])
    return draft


@pytest.mark.usefixtures("checkpoint")
def test_an_external_text_is_drafted_if_it_may_be_learned() -> None:
    assert drafted_after(with_memory(), TEXT[:4]) == TEXT[4:]
    assert drafted_after(with_memory(), TEXT[:4], learn=0) == []


@pytest.mark.usefixtures("checkpoint")
def test_an_external_text_is_drafted_for_its_tenant_only() -> None:
    hook = with_memory("a", "b")
    runner = Runner(a=TEXT[:4], b=TEXT[:4])
    for name, request in runner.requests.items():
        request.sampling_params.extra_args = tenant_fields(name)
    hook.attach(runner)
    hook.learn(TEXT, 4, {})
    hook.learn(TEXT, 4, tenant_fields("b"))
    assert _step(hook, runner, [[TEXT[3]]] * 2) == [[], TEXT[4:]]


@pytest.mark.usefixtures("checkpoint")
def test_an_external_text_is_drafted_for_its_adapter_only() -> None:
    hook = with_memory()
    runner = Runner(a=TEXT[:4], b=TEXT[:4])
    runner.requests["b"].lora_request = SimpleNamespace(lora_name="an-adapter")
    hook.attach(runner)
    hook.learn(TEXT, 4, {}, "an-adapter")
    assert _step(hook, runner, [[TEXT[3]]] * 2) == [[], TEXT[4:]]


@pytest.mark.usefixtures("checkpoint")
def test_a_long_text_is_learned_whole_when_all_slots_are_in_use() -> None:
    long = list(range(100)) * 60
    hook = with_memory()
    runner = Runner(**{f"r{number}": TEXT for number in range(20)})
    hook.attach(runner)
    names = runner.input_batch.req_ids
    for begin in range(0, 20, 4):
        runner.input_batch.req_ids = names[begin : begin + 4]
        _step(hook, runner, [[18]] * 4)
    before = num_learned(hook)
    hook.learn(long, 100, {})
    assert num_learned(hook) == before + len(long)
    _step(hook, runner, [[18]] * 4)
    hook.forget(names)


@pytest.mark.usefixtures("checkpoint")
def test_a_text_that_cannot_be_learned_takes_no_slot_from_requests() -> None:
    hook = with_memory()
    runner = Runner(a=TEXT[:4])
    hook.attach(runner)
    for _ in range(20):
        with pytest.raises(OverflowError):
            hook.learn([1 << 40], 1, {})
    hook.learn(TEXT, 4, {})
    assert _step(hook, runner, [[TEXT[3]]]) == [TEXT[4:]]


def num_learned(hook: ProposerHook) -> int:
    trie = _snapshot(hook).trie
    assert trie is not None
    return sum(each.ingested_tokens for each in trie.namespaces)


def test_scheduled_requests_take_the_slots_of_waiting_ones(hook: ProposerHook) -> None:
    runner = Runner(**{f"r{number}": REPEATING for number in range(20)})
    hook.attach(runner)
    batch = runner.input_batch
    names = batch.req_ids
    batch.token_ids_cpu[:, : len(REPEATING)] = REPEATING
    batch.num_tokens_no_spec[:] = len(REPEATING)
    for begin in (0, 4, 8, 12, 16, 0):
        batch.req_ids = names[begin : begin + 4]
        drafts = _step(hook, runner, [[4]] * 4)
        assert drafts == [[1, 2, 3, 4]] * 4
    hook.forget(names)
    assert _step(hook, runner, [[4]] * 4) == [[1, 2, 3, 4]] * 4
