from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import numpy as np
import pytest

from specserve.core.metrics import LinkSnapshot, SpeculationMetrics
from specserve.core.source_config import TrieConfig
from specserve.core.types import DraftBatch, Int32Array, RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.controls import NO_TENANT
from specserve.sources.trie import LEARN_TOKENS_PER_STEP, TrieSource
from specserve.trie import memory
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.namespaces import half_of, label, namespace
from specserve.trie.records import Record, TextPiece
from tests.draft_batches import propose

CONFIG = TrieConfig(kind="trie", max_bytes=4 << 20)
TENANTS = ("one", "two")
TEXT = np.random.default_rng(0).integers(0, 30_000, 6000).astype(np.int32)


@dataclass
class Published:
    """A fake link that records what is published to other replicas."""

    texts: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)

    def publish(self, piece: TextPiece) -> None:
        assert piece.stamp
        text = self.texts.setdefault((piece.namespace, piece.sequence), [])
        assert piece.start == len(text)
        text.extend(piece.tokens.tolist())
        if piece.final:
            self.finished.append(piece.sequence)

    def link(self) -> LinkSnapshot:
        return LinkSnapshot(True, 0.1, 5, 0)


def build(config: TrieConfig = CONFIG, tenants: tuple[str, ...] = ()) -> Asker:
    context = SourceContext(model_identity="m", tenants=tenants)
    return Asker(TrieSource.build(config, context))


@dataclass
class Draft:
    """One request's draft."""

    tokens: tuple[int, ...]
    label: str


class Asker:
    """A trie source whose requests have names."""

    def __init__(self, source: TrieSource) -> None:
        self.source = source
        self.slots: dict[str, int] = {}

    def __call__(
        self,
        *texts: Int32Array,
        names: list[str] | None = None,
        num_prompt_tokens: int = 10,
        limit: int = 8,
        controls: tuple[RequestControls, ...] = (),
    ) -> list[Draft]:
        """Runs a step of these requests; new ones are opened."""
        names = names or [f"r{row}" for row in range(len(texts))]
        for row, name in enumerate(names):
            if name not in self.slots:
                self.slots[name] = min(set(range(64)) - set(self.slots.values()))
                opened = controls[row] if controls else RequestControls()
                self.source.open(self.slots[name], opened)
        lengths = np.array([len(text) for text in texts], np.int32)
        rows = np.zeros((len(texts), lengths.max()), np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        slots = np.array([self.slots[name] for name in names])
        prompts = np.full(len(texts), num_prompt_tokens, np.int32)
        batch = DraftBatch(slots, rows, lengths, prompts)
        found = propose(self.source, batch, np.full(len(texts), limit, np.int32))
        rows[:] = -1  # the engine's buffer may change after the call
        return [
            Draft(tuple(tokens[:length].tolist()), TrieConfig.LABELS[label].name)
            for tokens, length, label in zip(found.tokens, found.lengths, found.labels, strict=True)
        ]

    def close(self, *names: str) -> None:
        self.source.close(np.array([self.slots.pop(name) for name in names], np.int64))


def test_a_text_of_one_request_is_drafted_for_another_in_the_next_step() -> None:
    ask = build()
    ask(TEXT[:100], names=["writes"])
    (draft,) = ask(TEXT[40:60], names=["asks"])
    assert draft.tokens == tuple(TEXT[60:68].tolist())
    assert draft.label == "trie_local"
    ask.close("writes", "asks")
    assert ask(TEXT[40:60], names=["later"])[0].tokens == draft.tokens


@pytest.mark.parametrize(("min_match_len", "num_found"), [(2, 2), (3, 1)])
def test_a_draft_needs_a_match_of_the_configured_length(min_match_len: int, num_found: int) -> None:
    ask = build(CONFIG.model_copy(update={"min_match_len": min_match_len}))
    ask(TEXT[:100], names=["writes"])
    other = TEXT[200:210]
    drafts = ask(*(np.append(other, TEXT[60 - match : 60]) for match in (2, 3)))
    assert sum(bool(draft.tokens) for draft in drafts) == num_found


def test_a_growing_text_is_learned_whole() -> None:
    ask = build()
    for end in (50, 51, 53, 60, 90):
        ask(TEXT[:end], names=["writes"])
    assert ask(TEXT[45:55], names=["asks"])[0].tokens == tuple(TEXT[55:63].tolist())


def test_a_long_prompt_is_learned_over_steps_without_delaying_others() -> None:
    ask = build()
    long, short = TEXT, TEXT[:60] + 1
    ask(long, short, names=["long", "short"], num_prompt_tokens=6000)
    trie = ask.source._memory.tries().get(namespace("m"))
    assert trie is not None
    assert trie.num_tokens == LEARN_TOKENS_PER_STEP + 60
    ask(long, short, names=["long", "short"], num_prompt_tokens=6000)
    assert trie.num_tokens == 6060


def test_of_a_long_text_that_ends_the_last_tokens_are_learned() -> None:
    ask = build()
    texts = np.random.default_rng(1).integers(0, 30_000, (2, 20_000)).astype(np.int32)
    ask(*texts, names=["one", "other"])
    full = np.full(2, 20_000, np.int32)
    slots = np.array([ask.slots["one"], ask.slots["other"]])
    ask.source.finish(DraftBatch(slots, texts, full, full - 10))
    trie = ask.source._memory.tries()[namespace("m")]
    assert trie.num_tokens == 3 * LEARN_TOKENS_PER_STEP
    for text in texts:
        assert ask(text[19_900:19_910])[0].tokens == tuple(text[19_910:19_918].tolist())
    begin = 20_000 - LEARN_TOKENS_PER_STEP
    assert ask(texts[0, begin - 9 : begin])[0].tokens == ()  # nothing follows across the gap
    ask.source.finish(DraftBatch(slots, texts, full, full - 10))
    assert trie.num_tokens - 3 * LEARN_TOKENS_PER_STEP < 100  # only what the three asked


def test_all_tokens_of_several_texts_that_end_together_are_learned() -> None:
    ask = build()
    texts = np.random.default_rng(1).integers(0, 30_000, (8, 2000)).astype(np.int32)
    names = [str(number) for number in range(len(texts))]
    ask(*texts[:, :1], names=names)
    full = np.full(len(texts), 2000, np.int32)
    slots = np.array([ask.slots[name] for name in names])
    ask.source.finish(DraftBatch(slots, texts, full, full - 10))
    assert ask.source._memory.tries()[namespace("m")].num_tokens == texts.size


def test_the_trie_of_a_replaced_adapter_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT_S", 0.0)
    ask = Asker(TrieSource.build(CONFIG, SourceContext(model_identity="m", num_adapters=2)))
    burst = [RequestControls(adapter=name) for name in ("a", "b")]
    ask(TEXT[:9], TEXT[:9], names=["a", "b"], controls=tuple(burst))
    tries = ask.source._memory.tries()
    replaced = [ref(tries.pop(namespace("m", name))) for name in ("a", "b")]
    del tries
    ask.close("a", "b")
    for name in ("c", "d"):
        ask(TEXT[:9], names=[name], controls=(RequestControls(adapter=name),))
        ask.close(name)
    ask(TEXT[:9], names=["e"], controls=(RequestControls(adapter="e"),))
    gc.collect()
    assert [trie() for trie in replaced] == [None, None]


def test_a_request_without_learn_gets_drafts_and_leaves_no_text() -> None:
    ask = build()
    ask(TEXT[:100], names=["writes"])
    secret = RequestControls(learn=False)
    own = np.concatenate([TEXT[200:230], TEXT[40:60]])
    (draft,) = ask(own, names=["secret"], controls=(secret,))
    assert draft.tokens == tuple(TEXT[60:68].tolist())
    assert ask(TEXT[205:215], names=["asks"])[0].tokens == ()
    ask.close("secret")
    assert ask(TEXT[205:215], names=["asks"])[0].tokens == ()


@pytest.mark.parametrize("options", [{"speculation": "off"}, {"max_draft_tokens": 0}])
def test_an_unlearned_text_without_drafts_takes_no_memory(options: dict[str, Any]) -> None:
    ask = build()
    controls = RequestControls(learn=False, **options)
    ask(TEXT[:100], names=["silent"], controls=(controls,))
    assert not any(trie.num_tokens for trie in ask.source._memory.tries().values())


def test_prompts_are_not_learned_if_learn_prompts_is_off() -> None:
    config = CONFIG.model_copy(update={"learn_prompts": False})
    ask = build(config)
    ask(TEXT[:100], names=["writes"], num_prompt_tokens=50)
    assert ask(TEXT[20:40], names=["asks"], num_prompt_tokens=20)[0].tokens == ()
    assert ask(TEXT[60:70], names=["asks too"], num_prompt_tokens=10)[0].tokens


@pytest.mark.parametrize("shared", [False, True])
def test_tenants_get_no_drafts_from_one_another_unless_they_share(shared: bool) -> None:
    ask = build(CONFIG.model_copy(update={"share_tenants": shared}), TENANTS)
    one, two = RequestControls(tenant="one"), RequestControls(tenant="two")
    ask(TEXT[:100], names=["writes"], controls=(one,))
    drafts = ask(TEXT[40:60], TEXT[40:60], names=["a", "b"], controls=(one, two))
    assert bool(drafts[0].tokens)
    assert bool(drafts[1].tokens) is shared


def test_one_tenants_flood_evicts_no_other_tenants_text() -> None:
    ask = build(tenants=TENANTS)
    one, two = RequestControls(tenant="one"), RequestControls(tenant="two")
    ask(TEXT[:100], names=["writes"], controls=(one,))
    ask.close("writes")
    for i in range(60):
        flood = np.random.default_rng(i).integers(0, 30_000, 4000).astype(np.int32)
        ask(flood, names=[f"flood {i}"], controls=(two,))
        ask.close(f"flood {i}")
    assert ask(TEXT[40:60], names=["asks"], controls=(one,))[0].tokens


def test_an_adapters_text_is_drafted_for_it_only() -> None:
    ask = Asker(TrieSource.build(CONFIG, SourceContext(num_adapters=1)))
    ask(TEXT[:100], names=["writes"], controls=(RequestControls(adapter="sql"),))
    assert ask(TEXT[40:60], names=["asks"])[0].tokens == ()


@pytest.mark.parametrize(
    ("tenants", "share_tenants", "in_the_log"),
    [
        pytest.param(("a", "b"), False, [""], id="api_keys are added"),
        pytest.param(("a", "c"), False, ["a", "b"], id="a tenant is renamed"),
        pytest.param(("a", "b"), True, ["a", "b"], id="share_tenants is set"),
        pytest.param(("a", "b"), False, ["", "a"], id="share_tenants is taken back"),
        pytest.param(("a", "b"), False, ["guest"], id="an unknown tenant is taught"),
        pytest.param(("a",), False, ["", "x", "y"], id="two applications of one model"),
    ],
)
def test_a_configured_tenant_gets_drafts_despite_others_in_the_log(
    tenants: tuple[str, ...], share_tenants: bool, in_the_log: list[str]
) -> None:
    metrics = SpeculationMetrics(("trie",))
    config = CONFIG.model_copy(update={"share_tenants": share_tenants})
    context = SourceContext(model_identity="m", tenants=tenants, num_adapters=1, metrics=metrics)
    ask = Asker(TrieSource.build(config, context))
    learner, tokens = ClusterLearner(ask.source._memory), TEXT[1000:1100].tobytes()
    for number, tenant in enumerate(in_the_log):
        for adapter in ("", "old"):
            of = namespace("m", adapter, tenant)
            learner.apply(Record("other", 1 + number, 0.0, of, sequence="s", tokens=tokens))
    for number, tenant in enumerate(tenants):
        for adapter in ("", "sql"):
            controls, name = (RequestControls(adapter=adapter, tenant=tenant),), f"{number}"
            text = TEXT[200 * number : 200 * number + 100]
            ask(text, names=[f"{name} writes {adapter}"], controls=controls)
            asks = [f"{name} asks {adapter}"]
            assert ask(text[40:60], names=asks, controls=controls)[0].tokens
    assert (metrics.snapshot().health[0].up, metrics.snapshot().health[0].reason) == (True, "")


def test_a_request_that_finds_no_trie_is_reported_and_gets_no_drafts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = SpeculationMetrics(("trie",))
    context = SourceContext(tenants=("a",), num_adapters=1, metrics=metrics)
    ask = Asker(TrieSource.build(CONFIG, context))

    def asks(name: str, *, adapter: str = "", tenant: str = "a") -> tuple[bool, str]:
        controls = (RequestControls(adapter=adapter, tenant=tenant),)
        assert ask(TEXT[40:60], names=[name], controls=controls)[0].tokens == ()
        health = metrics.snapshot().health[0]
        return health.up, health.reason

    assert asks("plain") == (True, "")
    assert asks("first", adapter="sql") == (True, "")
    up, reason = asks("second", adapter="chat")
    assert up
    assert reason.startswith("an adapter's request found no trie: a tenant has 1 (max_cpu_loras)")
    assert asks("plain again") == (up, reason)
    assert asks("unknown", tenant="b") == (True, "a request's tenant is not configured")
    assert asks("third", adapter="chat") == (up, reason)
    assert len(caplog.records) == 2
    ask.close("plain", "first", "second", "plain again", "unknown", "third")


def test_only_texts_that_may_be_learned_are_published() -> None:
    published = Published()
    memory = TrieMemory(CONFIG.max_bytes, [namespace("m")])
    ask = Asker(TrieSource(CONFIG, memory, SourceContext(model_identity="m"), published))
    secret = RequestControls(learn=False)
    for end in (30, 35, 60):
        texts = TEXT[:end], TEXT[100 : 100 + end]
        ask(
            *texts,
            names=["a", "secret"],
            num_prompt_tokens=30,
            controls=(RequestControls(), secret),
        )
    ask.close("a", "secret")
    [(of, name)] = published.texts
    assert of == namespace("m")
    assert published.texts[of, name] == TEXT[:60].tolist()
    assert published.finished == [name]


def test_a_growing_text_is_not_learned_after_a_purge() -> None:
    ask = build()
    ask(TEXT[:100], names=["grows"])
    ask.source._memory.clear(namespace("m"), 0.0)
    ask(TEXT[:200], names=["grows"])
    assert not any(trie.num_tokens for trie in ask.source._memory.tries().values())
    ask(TEXT[:300], names=["later"])
    ask.close("grows")
    assert ask(TEXT[40:60], names=["asks"])[0].tokens == tuple(TEXT[60:68].tolist())


def test_after_a_purge_a_growing_text_is_not_sent_to_other_replicas() -> None:
    published = Published()
    memory = TrieMemory(CONFIG.max_bytes, [namespace("m")])
    ask = Asker(TrieSource(CONFIG, memory, SourceContext(model_identity="m"), published))
    ask(TEXT[:200], names=["grows"])
    memory.clear(namespace("m"), 0.0)
    ask(TEXT[:400], names=["grows"])
    ask.close("grows")
    assert list(published.texts.values()) == [TEXT[:200].tolist()]


@pytest.mark.parametrize(("began", "num_tokens"), [(10.0, 0), (10.5, 100), (0.0, 100)])
def test_a_text_that_began_before_a_purge_is_not_learned_later(
    began: float, num_tokens: int
) -> None:
    ask = build()
    memory = ask.source._memory
    memory.clear(half_of(namespace("m")), 10.0)
    ask(TEXT[:100], names=["a beam search's"], controls=(RequestControls(began=began),))
    assert sum(trie.num_tokens for trie in memory.tries().values()) == num_tokens


def test_a_slots_next_request_is_learned_as_a_new_text() -> None:
    ask = build()
    ask(TEXT[:100], names=["first"])
    ask.close("first")
    ask(TEXT[200:230], names=["second"])
    [trie] = ask.source._memory.tries().values()
    assert trie.num_tokens == 130


def test_a_request_without_a_tenant_shares_nothing_if_there_are_tenants() -> None:
    ask = build(tenants=TENANTS)
    nobody = (RequestControls(tenant=NO_TENANT),)
    ask(TEXT[:100], names=["writes"], controls=nobody)
    assert ask(TEXT[40:60], names=["asks"], controls=nobody)[0].tokens == ()
    assert not sum(trie.num_tokens for trie in ask.source._memory.tries().values())


def test_the_metrics_show_the_tokens_of_each_namespace() -> None:
    metrics = SpeculationMetrics()
    ask = Asker(TrieSource.build(CONFIG, SourceContext(model_identity="m", metrics=metrics)))
    before = metrics.snapshot()
    ask(TEXT[:100], names=["writes"])
    now = metrics.snapshot()
    assert now.trie is not None
    [entry] = now.trie.namespaces
    assert (entry.namespace, entry.num_tokens, entry.ingested_tokens) == (namespace("m"), 100, 100)
    ask(TEXT[:130], names=["writes"])
    grown = metrics.snapshot().trie
    assert grown is not None
    assert [each.ingested_tokens for each in grown.namespaces] == [130]
    assert before.trie is not None
    assert [each.num_tokens for each in before.trie.namespaces] == [0]


def test_the_metrics_show_tenants_by_keyed_labels_only() -> None:
    metrics = SpeculationMetrics()
    context = SourceContext(tenants=TENANTS, metrics=metrics, label_key=b"secret")
    TrieSource.build(CONFIG, context)
    shown = metrics.snapshot().trie
    assert shown is not None
    names = [namespace("", tenant=tenant) for tenant in TENANTS]
    assert [each.namespace for each in shown.namespaces] == [
        label(name, b"secret") for name in names
    ]


def test_no_draft_is_longer_than_its_limits() -> None:
    ask = build()
    ask(TEXT[:200], names=["writes"])
    assert len(ask(TEXT[40:60], names=["a"], limit=3)[0].tokens) == 3
    assert ask(TEXT[40:60], names=["c"], limit=0)[0].tokens == ()
