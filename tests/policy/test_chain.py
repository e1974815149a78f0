from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from specserve.sources.acceptance import num_right
from specserve.sources.gate import Gate
from specserve.sources.step_cost import CALIBRATION_STEPS

from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.source_config import NgramConfig
from specserve.core.types import Draft, DraftBatch, Outcome, RequestControls
from specserve.policy.chain import ProposerChain, build_chain
from specserve.sources.base import SourceContext

AUTO = RequestControls()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Source:
    """A proposer that answers what it is told to, and remembers what it was asked."""

    def __init__(self, answer: Callable[[DraftBatch], object]) -> None:
        self.answer = answer
        self.limits: list[list[int]] = []
        self.forgotten: list[str] = []

    def propose(self, batch: DraftBatch) -> list[Draft]:
        self.limits.append(batch.max_draft_tokens.tolist())
        return self.answer(batch)  # type: ignore[return-value]

    def forget(self, request_ids: list[str]) -> None:
        self.forgotten.extend(request_ids)


def always(*tokens: int) -> Callable[[DraftBatch], list[Draft]]:
    return lambda batch: [Draft(tokens, "ngram") for _ in batch.request_ids]


def only(row: int, *tokens: int) -> Callable[[DraftBatch], list[Draft]]:
    return lambda batch: [
        Draft(tokens if index == row else (), "ngram") for index in range(len(batch))
    ]


def broken(batch: DraftBatch) -> list[Draft]:
    raise OSError("no route to the drafter")


def batch(*limits: int) -> DraftBatch:
    count = len(limits)
    ones = np.ones(count, np.int32)
    names = [f"r{row}" for row in range(count)]
    return DraftBatch(names, np.ones((count, 8), np.int32), ones, ones, np.array(limits, np.int32))


def tokens(drafts: list[Draft]) -> list[tuple[int, ...]]:
    return [draft.tokens for draft in drafts]


def health(metrics: SpeculationMetrics, kind: str) -> HealthSnapshot:
    return next(entry for entry in metrics.snapshot().health if entry.source == kind)


def offers(source: str, *guess: int, match_len: int = 4) -> Source:
    """A source that always guesses the same."""
    return Source(lambda batch: [Draft(guess, source, match_len)] * len(batch))


def test_where_one_source_has_no_guess_another_ones_is_taken() -> None:
    first, second = Source(only(1, 5)), Source(always(6, 7))
    chain = ProposerChain([("ngram", first), ("mtp", second)], SpeculationMetrics())
    assert tokens(chain.step(batch(4, 4), [], [AUTO, AUTO])) == [(6, 7), (6, 7)]
    assert second.limits == [[4, 4]]


def test_of_drafts_that_promise_the_same_the_first_sources_is_taken() -> None:
    sources = [("ngram", offers("ngram", 1, 2)), ("trie", offers("trie_local", 3, 4))]
    chain = ProposerChain(sources, SpeculationMetrics())
    assert tokens(chain.step(batch(4), [], [AUTO])) == [(1, 2)]


def test_the_source_is_chosen_whose_drafts_are_accepted_also_when_they_were_not_sent() -> None:
    sources = [("ngram", offers("ngram", 1, 2)), ("trie", offers("trie_local", 3, 4))]
    chain = ProposerChain(sources, SpeculationMetrics())
    (draft,) = chain.step(batch(4), [], [AUTO])
    for _ in range(3):  # the target writes what the trie would have drafted
        num_accepted = 2 if draft.source == "trie_local" else 0
        new_tokens = (3, 4, 5)[: num_accepted + 1]
        (draft,) = chain.step(batch(4), [Outcome("r0", draft, num_accepted, new_tokens)], [AUTO])
    assert draft.source == "trie_local"


def test_every_source_sees_every_step() -> None:
    source = Source(always(6))
    chain = ProposerChain([("trie", source)], SpeculationMetrics())
    assert tokens(chain.step(batch(0, 4), [], [AUTO, RequestControls("off")])) == [(), ()]
    assert source.limits == [[0, 0]]


def test_a_request_may_switch_speculation_off_or_name_its_source() -> None:
    sources = [("ngram", Source(always(5))), ("mtp", Source(always(6)))]
    chain = ProposerChain(sources, SpeculationMetrics())
    wishes = [AUTO, RequestControls("off"), RequestControls("mtp"), RequestControls("ngram")]
    assert tokens(chain.step(batch(4, 4, 4, 4), [], wishes)) == [(5,), (), (6,), (5,)]


def test_a_draft_is_cut_to_the_engines_and_to_the_requests_limit() -> None:
    chain = ProposerChain([("ngram", Source(always(1, 2, 3, 4)))], SpeculationMetrics())
    wishes = [AUTO, RequestControls(max_draft_tokens=3), RequestControls(max_draft_tokens=0)]
    assert tokens(chain.step(batch(2, 9, 9), [], wishes)) == [(1, 2), (1, 2, 3), ()]


def test_limits_below_zero_count_as_none() -> None:
    chain = ProposerChain([("ngram", Source(always(1)))], SpeculationMetrics())
    assert tokens(chain.step(batch(-3), [], [AUTO])) == [()]


@pytest.mark.parametrize(
    "wrong",
    [(1, -1), (1, 100), (1.5,), ("a",), (True,), [1, 2], (np.int32(3),)],
    ids=str,
)
def test_a_draft_that_is_not_made_of_tokens_is_dropped_and_counted(wrong: object) -> None:
    def answer(batch: DraftBatch) -> list[Draft]:
        return [Draft(wrong, "ngram"), Draft((1, 2), "ngram")]  # type: ignore[arg-type]

    metrics = SpeculationMetrics()
    chain = ProposerChain([("ngram", Source(answer))], metrics, vocab_size=100)
    assert tokens(chain.step(batch(4, 4), [], [AUTO, AUTO])) == [(), (1, 2)]
    assert health(metrics, "ngram").num_errors == 1
    assert health(metrics, "ngram").up


@pytest.mark.parametrize("wrong", [(0.5,), (0.5, -0.1), (1.5, 0.5), (0.5, float("nan"))], ids=str)
def test_a_draft_with_chances_that_are_none_is_dropped_and_counted(
    wrong: tuple[float, ...],
) -> None:
    metrics = SpeculationMetrics()
    source = Source(lambda _: [Draft((1, 2), "ngram", chances=wrong)])
    assert tokens(ProposerChain([("ngram", source)], metrics).step(batch(4), [], [AUTO])) == [()]
    assert health(metrics, "ngram").num_errors == 1


@pytest.mark.parametrize("answer", [[], None, [1], [None]], ids=str)
def test_an_answer_that_is_not_one_draft_a_request_switches_the_source_off(answer: object) -> None:
    metrics = SpeculationMetrics()
    chain = ProposerChain([("ngram", Source(lambda _: answer))], metrics, clock=Clock())
    assert tokens(chain.step(batch(4), [], [AUTO])) == [()]
    assert not health(metrics, "ngram").up


def test_a_source_that_raises_rests_and_the_next_one_takes_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics, clock = SpeculationMetrics(), Clock()
    first = Source(broken)
    chain = ProposerChain([("mtp", first), ("ngram", Source(always(6)))], metrics, clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert tokens(chain.step(batch(4), [], [AUTO])) == [(6,)]
    assert len(first.limits) == 1
    assert (health(metrics, "mtp").up, health(metrics, "mtp").num_errors) == (False, 1)
    assert health(metrics, "ngram").up
    (record,) = caplog.records
    reason = health(metrics, "mtp").reason
    assert reason == "OSError: 'no route to the drafter'"
    assert record.getMessage() == f"draft source mtp is switched off: {reason}"


def test_each_failed_probe_doubles_the_rest_up_to_a_minute() -> None:
    clock = Clock()
    source = Source(broken)
    chain = ProposerChain([("ngram", source)], SpeculationMetrics(), clock=clock)
    called_at = []
    for _ in range(4000):
        before = len(source.limits)
        chain.step(batch(4), [], [AUTO])
        if len(source.limits) > before:
            called_at.append(clock.now)
        clock.now += 0.125
    rests = np.diff(called_at).tolist()
    assert rests[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert set(rests[7:]) == {60.0}


def test_a_source_that_answers_a_probe_is_up_again(caplog: pytest.LogCaptureFixture) -> None:
    metrics, clock = SpeculationMetrics(), Clock()
    source = Source(broken)
    chain = ProposerChain([("ngram", source)], metrics, clock=clock)
    chain.step(batch(4), [], [AUTO])
    source.answer = always(3)
    clock.now += 1.0
    with caplog.at_level(logging.WARNING):
        assert tokens(chain.step(batch(4), [], [AUTO])) == [(3,)]
        assert tokens(chain.step(batch(4), [], [AUTO])) == [(3,)]
    assert health(metrics, "ngram").up
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "draft source ngram is up again"
    ]


def test_errors_in_forget_do_not_reach_the_request() -> None:
    class Fragile(Source):
        def forget(self, request_ids: list[str]) -> None:
            raise KeyError("forget")

    metrics = SpeculationMetrics()
    chain = ProposerChain([("ngram", Fragile(always(1)))], metrics, clock=Clock())
    chain.step(batch(4), [Outcome("r0", None, 0, (5,))], [AUTO])
    chain.forget(["r0"])
    assert health(metrics, "ngram").num_errors == 1


def test_a_resting_source_is_still_told_what_to_forget() -> None:
    source = Source(broken)
    chain = ProposerChain([("ngram", source)], SpeculationMetrics(), clock=Clock())
    chain.step(batch(4), [], [AUTO])
    chain.forget(["r0", "r1"])
    assert source.forgotten == ["r0", "r1"]


def test_what_became_of_drafts_is_counted() -> None:
    metrics = SpeculationMetrics()
    chain = ProposerChain([("ngram", Source(always(1)))], metrics)
    outcomes = [
        Outcome("r0", Draft((1, 2, 3), "ngram"), 2, (1, 2, 9)),
        Outcome("r1", None, 0, (4,)),
    ]
    chain.step(batch(4, 4), outcomes, [AUTO, AUTO])
    [entry] = metrics.snapshot().acceptance
    assert (entry.num_drafts, entry.num_draft_tokens, entry.num_accepted_tokens) == (1, 3, 2)


def test_calls_are_timed() -> None:
    metrics, clock = SpeculationMetrics(), Clock()

    def slow(batch: DraftBatch) -> list[Draft]:
        clock.now += 0.004
        return always(1)(batch)

    ProposerChain([("ngram", Source(slow))], metrics, clock=clock).step(batch(4), [], [AUTO])
    assert health(metrics, "ngram").latency_sum_s == pytest.approx(0.004)


def test_a_chain_without_sources_drafts_nothing() -> None:
    chain = ProposerChain([], SpeculationMetrics())
    assert tokens(chain.step(batch(4), [], [AUTO])) == [()]


def repeated(count: int) -> DraftBatch:
    text = np.array([[1, 2, 3, 4, 5, 6] * 4] * count, np.int32)
    lengths = np.full(count, text.shape[1], np.int32)
    names = [f"r{row}" for row in range(count)]
    return DraftBatch(names, text, lengths, lengths, np.full(count, 8, np.int32))


def test_a_configured_chain_drafts_from_the_text() -> None:
    config = NgramConfig(kind="ngram", max_draft_len=3, dynamic=False)
    chain = build_chain([config], SpeculationMetrics(), SourceContext(vocab_size=7))
    assert chain.kinds == ("ngram",)
    assert tokens(chain.step(repeated(1), [], [AUTO])) == [(1, 2, 3)]


def test_a_dynamic_source_stops_drafting_what_is_never_accepted_at_a_price() -> None:
    chain = build_chain([NgramConfig(kind="ngram")], SpeculationMetrics())
    fixed = build_chain([NgramConfig(kind="ngram", dynamic=False)], SpeculationMetrics())
    drafted = {chain: 0, fixed: 0}
    for each in drafted:
        outcomes: list[Outcome] = []
        for _ in range(200):
            drafts = each.step(repeated(4), outcomes, [AUTO] * 4)
            num_tokens = sum(len(draft.tokens) for draft in drafts)
            each.observe_step(4, num_tokens, 0.01 + 0.002 * num_tokens)
            drafted[each] += num_tokens
            outcomes = [
                Outcome(f"r{row}", draft if draft.tokens else None, 0, (9,))
                for row, draft in enumerate(drafts)
            ]
    assert drafted[fixed] == 200 * 4 * 8
    assert drafted[chain] < 100


def test_a_source_that_takes_time_is_asked_last_and_for_no_more_than_it_can_draft() -> None:
    order: list[str] = []

    def answering(name: str) -> Source:
        def answer(batch: DraftBatch) -> list[Draft]:
            order.append(name)
            return [Draft((), "ngram")] * len(batch)

        return Source(answer)

    remote, near = answering("mtp"), answering("ngram")
    chain = ProposerChain(
        [("mtp", remote), ("ngram", near)],
        SpeculationMetrics(),
        gated_kinds=frozenset({"mtp"}),
        remote_kinds={"mtp": 2},
    )
    for _ in range(10):  # that cannot be measured: it is not waited for any longer
        chain.step(batch(16, 1, 0), [], [AUTO] * 3)
    assert order == ["ngram", "mtp"] * 10
    assert near.limits[-1] == [16, 1, 0]
    assert remote.limits[-1] == [2, 1, 0]


@pytest.mark.parametrize(("call_s", "is_asked"), [(0.003, True), (0.02, False)])
def test_a_source_that_takes_time_is_asked_where_its_only_token_is_worth_it(
    call_s: float, is_asked: bool
) -> None:
    clock = Clock()

    def answer(batch: DraftBatch) -> list[Draft]:
        if not batch.max_draft_tokens.any():
            return [Draft((), "mtp")]
        clock.now += call_s
        return [Draft((7,), "mtp")]

    remote = Source(answer)
    chain = ProposerChain(
        [("mtp", remote)],
        SpeculationMetrics(),
        gated_kinds=frozenset({"mtp"}),
        remote_kinds={"mtp": 1},
        clock=clock,
    )
    drafts = [Draft((), "mtp")]
    for number in range(400):
        sent = drafts[0] if drafts[0].tokens else None
        num_accepted = int(sent is not None and number % 5 != 0)
        outcome = Outcome("r0", sent, num_accepted, (7,) * (num_accepted + 1))
        chain.observe_step(1, len(drafts[0].tokens), 0.010)
        drafts = chain.step(batch(16), [outcome], [AUTO])
    num_asked = sum(limits != [0] for limits in remote.limits[20:])
    assert num_asked > 350 if is_asked else num_asked < 20


def finds_nothing(clock: Clock) -> Source:
    """A source that takes time, for nothing."""

    def search(batch: DraftBatch) -> list[Draft]:
        clock.now += 0.0003
        return [Draft((), "ngram")] * len(batch)

    return Source(search)


def after_many_steps(kind: str, source: Source, clock: Clock) -> ProposerChain:
    """A chain of one source, which was asked whenever it was due in 1000 plain steps."""
    chain = ProposerChain(
        [(kind, source)], SpeculationMetrics((kind,)), gated_kinds=frozenset({kind}), clock=clock
    )
    for _ in range(1000):
        if due := chain.due(1):
            chain.step(batch(4), [], [AUTO], due)
        chain.observe_step(1, 0, 0.01)
    return chain


def test_the_time_for_judging_what_a_source_found_counts_as_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, source, trim = Clock(), Source(always()), Gate.trim

    def slow_trim(self: Gate, request_ids: Sequence[str], drafts: list[Draft]) -> list[Draft]:
        clock.now += 0.0003
        return trim(self, request_ids, drafts)

    monkeypatch.setattr(Gate, "trim", slow_trim)
    after_many_steps("ngram", source, clock)
    assert len(source.limits) < 500


def test_a_source_that_brings_nothing_is_asked_seldom_and_sees_texts_when_they_end() -> None:
    clock = Clock()
    source = finds_nothing(clock)
    chain = after_many_steps("trie", source, clock)
    num_asked = len(source.limits)
    assert num_asked < 500
    assert chain.has_unseen_texts

    chain.finish(batch(0))
    assert source.limits[num_asked:] == [[0]]


def test_a_source_that_is_to_draft_always_is_asked_at_every_step() -> None:
    clock = Clock()
    source = finds_nothing(clock)
    chain = ProposerChain([("ngram", source)], SpeculationMetrics(("ngram",)), clock=clock)
    for _ in range(1000):
        chain.step(batch(4), [], [AUTO])
        chain.observe_step(1, 0, 0.01)
        assert not chain.num_idle_steps(["r0"])
    assert len(source.limits) == 1000
    assert not chain.has_unseen_texts


def test_sources_that_bring_nothing_are_asked_as_often_where_idle_steps_are_not_told() -> None:
    num_asked = []
    for is_told in (True, False):
        clock = Clock()
        kinds = ("ngram", "trie")
        sources = [(kind, finds_nothing(clock)) for kind in kinds]
        chain = ProposerChain(
            sources, SpeculationMetrics(kinds), gated_kinds=frozenset(kinds), clock=clock
        )
        num_steps = 1000
        while num_steps > 0:
            num_idle_steps = 0 if is_told else chain.num_idle_steps(["r0"])
            num_steps -= num_idle_steps + 1
            if due := chain.due(1, num_idle_steps + 1):
                chain.step(batch(4), [], [AUTO], due)
            chain.observe_step(1, 0, 0.01)
        num_asked.append([len(source.limits) for _, source in sources])
    assert num_asked[0] == num_asked[1]


def num_asked_of_two(
    ngram: Callable[[int], tuple[int, ...]],
    trie: Callable[[int], tuple[int, ...]],
    trie_seconds: float = 0.0003,
) -> tuple[int, int]:
    """How often two sources are asked in the last 400 of 600 steps, in which the target writes 1 to
    5; they draft what is told by step."""
    clock, step = Clock(), 0

    def source(draft: Callable[[], Draft], seconds: float) -> Source:
        def search(batch: DraftBatch) -> list[Draft]:
            clock.now += seconds
            return [draft()] * len(batch)

        return Source(search)

    sources = {
        "ngram": source(lambda: Draft(ngram(step), "ngram", 2), 0.0003),
        "trie": source(lambda: Draft(trie(step), "trie_local", 8), trie_seconds),
    }
    chain = ProposerChain(
        list(sources.items()),
        SpeculationMetrics(tuple(sources)),
        gated_kinds=frozenset(sources),
        clock=clock,
    )
    outcomes: list[Outcome] = []
    for step in range(600):
        if step == 200:
            for each in sources.values():
                each.limits.clear()
        (draft,) = chain.step(batch(4), outcomes, [AUTO], chain.due(1))
        accepted = num_right(draft, (1, 2, 3, 4, 5))
        new_tokens = (1, 2, 3, 4, 5)[: accepted + 1]
        outcomes = [Outcome("r0", draft if draft.tokens else None, accepted, new_tokens)]
        chain.observe_step(1, len(draft.tokens), 0.01)
    return len(sources["ngram"].limits), len(sources["trie"].limits)


def test_a_source_that_foresees_only_what_a_better_one_does_is_asked_seldom() -> None:
    # Its few drafts are sent, since it is never wrong.
    few = num_asked_of_two(
        lambda step: () if step % 7 else (1, 2, 3, 4),
        lambda step: (1, 9) if step % 7 else (1, 2, 3, 4),
    )
    assert few[0] < 100
    assert few[1] == 400


def test_a_source_that_goes_further_than_a_better_one_is_asked_at_every_step() -> None:
    both = num_asked_of_two(
        lambda step: () if step % 7 else (1, 2, 3, 4),
        lambda step: (1, 2, 9) if step % 7 else (1, 9),
    )
    assert both == (400, 400)


def test_of_two_sources_that_foresee_the_same_one_is_asked_at_every_step() -> None:
    fewest, most = sorted(num_asked_of_two(lambda step: (1, 2), lambda step: (1, 2)))
    assert fewest < 100
    assert most == 400


@pytest.mark.parametrize("right_each", [1, 6])
def test_of_two_sources_that_foresee_the_same_the_cheaper_one_is_asked(right_each: int) -> None:
    num_ngram, num_trie = num_asked_of_two(
        lambda step: (9, 9) if step % right_each else (1, 2),
        lambda step: (9, 9) if step % right_each else (1, 2),
        trie_seconds=0.004,
    )
    assert num_ngram == 400
    assert num_trie < 100


def test_no_step_is_idle_while_there_is_a_draft_to_learn_from() -> None:
    clock = Clock()
    source = finds_nothing(clock)
    chain = ProposerChain(
        [("trie", source)],
        SpeculationMetrics(("trie",)),
        gated_kinds=frozenset({"trie"}),
        clock=clock,
    )
    for _ in range(100):
        chain.observe_step(1, 0, 0.01)
        chain.step(batch(4), [], [AUTO])
    while not chain.num_idle_steps(["r0"]):
        chain.step(batch(4), [], [AUTO])

    source.answer = lambda batch: [Draft((1, 2), "trie_local", 2)]
    chain.step(batch(4), [], [AUTO], frozenset({"trie"}))
    assert not chain.num_idle_steps(["r0"])
    chain.observe([Outcome("r0", None, 0, (5,))])
    assert chain.num_idle_steps(["r0"])


def test_a_drafter_that_is_fed_hidden_states_sees_every_step() -> None:
    clock = Clock()
    metrics = SpeculationMetrics(("ngram", "mtp"))
    chain = ProposerChain(
        [("ngram", finds_nothing(clock)), ("mtp", Source(lambda batch: [Draft((), "mtp")]))],
        metrics,
        gated_kinds=frozenset({"ngram", "mtp"}),
        remote_kinds={"mtp": 1},
        clock=clock,
    )
    for _ in range(200):
        chain.observe_step(1, 0, 0.01)
        chain.step(batch(4), [], [AUTO])
        assert not chain.num_idle_steps(["r0"])


def test_a_source_that_cannot_say_what_reading_takes_rests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Illiterate(Source):
        def reading_s(self, batch: DraftBatch) -> list[float]:
            raise OSError("no such text")

    metrics = SpeculationMetrics(("mtp",))
    chain = ProposerChain(
        [("mtp", Illiterate(always(1)))],
        metrics,
        gated_kinds=frozenset({"mtp"}),
        remote_kinds={"mtp": 1},
    )
    for _ in range(CALIBRATION_STEPS):  # before, nothing is to be decided
        chain.observe_step(1, 0, 0.01)
    assert tokens(chain.step(batch(4), [], [AUTO])) == [()]
    assert health(metrics, "mtp").num_errors == 1
    assert "no such text" in caplog.text
