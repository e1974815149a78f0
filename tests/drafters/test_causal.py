"""The draft model's drafter, with the demo draft model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM

from specserve.core.errors import ConfigError
from specserve.core.types import Int32Array
from specserve.drafters import slots
from specserve.drafters.base import Answer, Row
from specserve.drafters.causal import CausalDrafter
from specserve.drafters.causal_model import CausalModel
from specserve.drafters.kv_cache import KVCache, Packed
from specserve.drafters.schedule import Call, Task
from specserve.wire.messages import Card

MODEL = str(Path(__file__).parents[2] / "configs/models/demo-draft")
CPU = torch.device("cpu")


class CountingModel(CausalModel):
    """Counts the computed tokens, and fails if ``is_broken``."""

    num_computed = 0
    is_broken = False

    def forward(self, ids: Tensor, cache: KVCache, packed: Packed, num_wanted: int) -> Tensor:
        if self.is_broken:
            raise RuntimeError("no memory left")
        self.num_computed += len(ids)
        return super().forward(ids, cache, packed, num_wanted)


@pytest.fixture(scope="module")
def shared_model() -> CountingModel:
    return CountingModel.load(MODEL, torch.float32, CPU)


@pytest.fixture
def model(shared_model: CountingModel) -> CountingModel:
    shared_model.num_computed, shared_model.is_broken = 0, False
    return shared_model


@pytest.fixture(scope="module")
def reference() -> Any:
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    return reference


def drafter_of(model: CausalModel, max_texts: int = 8, max_tokens: int = 256) -> CausalDrafter:
    card = Card(
        kind="draft_model",
        model=MODEL,
        vocab_size=model.vocab_size,
        tokenizer="",
        hidden_size=0,
        max_tokens=max_tokens,
    )
    return CausalDrafter(model, card, max_texts)


def text(length: int, seed: int = 0) -> Int32Array:
    return np.random.default_rng(seed).integers(6, 4096, length).astype(np.int32)


def key(number: int) -> tuple[bytes, int]:
    return (b"client", number)


def row(
    number: int, tokens: Int32Array, draft_len: int = 0, *, start: int = 0, salt: int = 0
) -> Row:
    """A text's row from ``start`` on; ``tokens`` are the whole text."""
    return Row(
        key=key(number), salt=salt, start=start, tokens=tokens[start:], max_draft_tokens=draft_len
    )


def fed(drafter: CausalDrafter, whole: Row) -> Answer:
    """The answer to a row that is computed in pieces, as by a server."""
    task = Task(Call(b"client", 1, 0.0, 0, [None]), 0, whole)
    while task.advance(*drafter.draft([task.piece()])):
        pass
    (answer,) = task.call.answers
    assert answer is not None
    return answer


def greedy(reference: Any, tokens: Int32Array, length: int) -> tuple[int, ...]:
    ids = torch.as_tensor(tokens.astype(np.int64))[None]
    written = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length
    )
    return tuple(written[0, len(tokens) :].tolist())


def test_a_draft_is_what_transformers_generates(model: CountingModel, reference: Any) -> None:
    tokens = text(40)
    answer = drafter_of(model).draft([row(0, tokens, 6)])
    assert answer == [Answer(40, greedy(reference, tokens, 6))]


def test_a_drafts_chances_are_the_models_probabilities(
    model: CountingModel, reference: Any
) -> None:
    tokens = text(40)
    (answer,) = drafter_of(model).draft([row(0, tokens, 6)])
    ids = torch.tensor([[*tokens.tolist(), *answer.tokens]])
    with torch.inference_mode():
        probabilities = reference(ids).logits[0, 39:-1].softmax(-1)
    expected = [
        float(each[token]) for each, token in zip(probabilities, answer.tokens, strict=True)
    ]
    assert answer.chances == pytest.approx(expected, abs=1e-4)


def test_a_batch_gets_the_same_drafts_as_each_text_alone(
    model: CountingModel, reference: Any
) -> None:
    lengths, draft_lens = [1, 30, 7, 100, 16], [3, 0, 6, 1, 4]
    texts = [text(length, seed) for seed, length in enumerate(lengths)]
    rows = [row(i, tokens, draft_lens[i]) for i, tokens in enumerate(texts)]
    together = drafter_of(model).draft(rows)
    assert together == [drafter_of(model).draft([each])[0] for each in rows]
    for answer, tokens, draft_len in zip(together, texts, draft_lens, strict=True):
        wanted = greedy(reference, tokens, draft_len) if draft_len else ()
        assert answer == Answer(len(tokens), wanted)


def test_steps_over_many_texts_use_the_cache(model: CountingModel, reference: Any) -> None:
    drafter = drafter_of(model)
    texts = [text(20 + 9 * i, i) for i in range(3)]
    held = [0, 0, 0]
    for step in range(4):
        rows = [row(i, tokens, 3, start=held[i]) for i, tokens in enumerate(texts)]
        for i, answer in enumerate(drafter.draft(rows)):
            assert answer.tokens == greedy(reference, texts[i], 3)
            held[i] = answer.held
            # Step n accepts n draft tokens; then another token follows.
            accepted = np.array(answer.tokens[:step], np.int32)
            texts[i] = np.concatenate([texts[i], accepted, text(1, 100 * step + i)])


def test_a_text_can_be_rolled_back_to_its_middle(model: CountingModel, reference: Any) -> None:
    drafter = drafter_of(model)
    drafter.draft([row(0, text(50), 4)])
    other = np.concatenate([text(50)[:21], text(8, seed=1)])
    model.num_computed = 0
    assert drafter.draft([row(0, other, 1, start=21)]) == [Answer(29, greedy(reference, other, 1))]
    assert model.num_computed == 8


def test_a_repeated_row_gets_the_same_answer_from_the_cache(
    model: CountingModel,
) -> None:
    drafter = drafter_of(model)
    first = drafter.draft([row(0, text(33), 4)])
    model.num_computed = 0
    assert drafter.draft([row(0, text(33), 4)]) == first
    assert model.num_computed == 33 - 32 + 3
    model.num_computed = 0
    assert drafter.draft([row(0, text(33), 4, start=33)]) == first
    assert model.num_computed == 4


def test_a_text_in_pieces_gets_the_same_draft(model: CountingModel, reference: Any) -> None:
    drafter = drafter_of(model)
    tokens = text(90)
    for start, end in [(0, 32), (32, 70)]:
        assert drafter.draft([row(0, tokens[:end], start=start)]) == [Answer(end)]
    answer = drafter.draft([row(0, tokens, 3, start=70)])
    assert answer == [Answer(90, greedy(reference, tokens, 3))]
    assert model.num_computed == 90 + 2


def test_a_text_that_lost_its_slot_can_be_sent_again(
    model: CountingModel, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "KEEP_S", 0.0)
    drafter = drafter_of(model, max_texts=2)
    for number in range(3):
        drafter.draft([row(number, text(20, number), 1)])
    assert drafter.draft([row(0, text(21), 2, start=20)]) == [Answer(0)]
    answer = drafter.draft([row(0, text(21), 2)])
    assert answer == [Answer(21, greedy(reference, text(21), 2))]


def test_texts_without_a_free_slot_are_not_held(model: CountingModel) -> None:
    rows = [row(number, text(20, number), 1) for number in range(3)]
    answers = drafter_of(model, max_texts=2).draft(rows)
    assert [answer.held for answer in answers] == [20, 20, 0]
    assert [len(answer.tokens) for answer in answers] == [1, 1, 0]


def test_a_shared_prefix_is_computed_once(model: CountingModel, reference: Any) -> None:
    drafter = drafter_of(model)
    drafter.draft([row(0, text(48))])
    other = np.concatenate([text(40), text(5, seed=1)])
    model.num_computed = 0
    answer = drafter.draft([row(1, other, 2)])
    assert answer == [Answer(45, greedy(reference, other, 2))]
    assert model.num_computed == 45 - 40 + 1


@pytest.mark.parametrize("max_texts", [8, 1])
def test_a_shared_prefix_longer_than_a_piece_is_computed_once(
    model: CountingModel, reference: Any, max_texts: int
) -> None:
    drafter = drafter_of(model, max_texts, max_tokens=1024)
    fed(drafter, row(0, text(900)))
    drafter.forget([key(0)])
    model.num_computed = 0
    other = np.concatenate([text(800), text(100, seed=1)])
    assert fed(drafter, row(1, other, 2)) == Answer(900, greedy(reference, other, 2))
    assert model.num_computed == 900 - 800 + 1


def test_a_call_computes_at_most_max_feed_tokens(model: CountingModel, reference: Any) -> None:
    drafter, whole = drafter_of(model), row(0, text(90), 2)
    assert drafter.draft([replace(whole, max_feed_tokens=40)]) == [Answer(40)]
    assert model.num_computed == 40
    rest = row(0, text(90), 2, start=40)
    draft = greedy(reference, text(90), 2)
    assert drafter.draft([replace(rest, max_feed_tokens=50)]) == [Answer(90, draft)]


def test_a_text_that_another_key_holds_whole_gets_a_draft(
    model: CountingModel, reference: Any
) -> None:
    drafter = drafter_of(model)
    drafter.draft([row(0, text(48))])
    assert drafter.draft([row(1, text(48), 2)]) == [Answer(48, greedy(reference, text(48), 2))]
    assert model.num_computed == 48 + 2


def test_new_texts_of_one_call_do_not_share_their_prefix(
    model: CountingModel, reference: Any
) -> None:
    tokens = text(40)
    answers = drafter_of(model).draft([row(0, tokens, 2), row(1, tokens, 2)])
    assert answers == [Answer(40, greedy(reference, tokens, 2))] * 2


def test_other_salts_share_nothing(model: CountingModel) -> None:
    drafter = drafter_of(model)
    drafter.draft([row(0, text(48), salt=1)])
    drafter.draft([row(1, text(48), salt=2)])
    assert model.num_computed == 2 * 48


def test_an_ended_text_is_forgotten_but_its_prefix_is_reused(
    model: CountingModel,
) -> None:
    drafter = drafter_of(model, max_texts=1)
    drafter.draft([row(0, text(32))])
    drafter.forget([key(0), key(99)])
    assert drafter.draft([row(0, text(33), 1, start=32)]) == [Answer(0)]
    drafter.draft([row(1, text(33))])
    assert model.num_computed == 33


@pytest.mark.parametrize(("length", "draft_len"), [(60, 4), (62, 2), (63, 1), (64, 0)])
def test_a_draft_ends_at_the_longest_text_length(
    model: CountingModel, reference: Any, length: int, draft_len: int
) -> None:
    answer = drafter_of(model, max_tokens=64).draft([row(0, text(length), 4)])
    wanted = greedy(reference, text(length), draft_len) if draft_len else ()
    assert answer == [Answer(length, wanted)]


def test_a_text_that_is_too_long_gets_no_draft(model: CountingModel) -> None:
    drafter = drafter_of(model, max_tokens=64)
    assert drafter.draft([row(0, text(65), 2)]) == [Answer(0)]
    drafter.draft([row(0, text(60))])
    assert drafter.draft([row(0, text(65), 2, start=60)]) == [Answer(60)]


@pytest.mark.parametrize(
    ("garbage", "held"),
    [
        (row(0, text(40), 2, start=31), 30),
        (row(7, text(5), 2, start=2), 0),
        (Row(key=key(7), salt=0, start=0, tokens=np.empty(0, np.int32), max_draft_tokens=2), 0),
    ],
    ids=["beyond held", "unknown", "empty"],
)
def test_an_invalid_row_gets_no_draft_and_affects_no_other_row(
    model: CountingModel, reference: Any, garbage: Row, held: int
) -> None:
    drafter = drafter_of(model)
    drafter.draft([row(0, text(30))])
    answers = drafter.draft([garbage, row(1, text(25, 1), 2)])
    assert answers == [Answer(held), Answer(25, greedy(reference, text(25, 1), 2))]


def test_a_failed_forward_leaves_the_texts_usable(model: CountingModel, reference: Any) -> None:
    drafter = drafter_of(model)
    drafter.draft([row(0, text(30))])
    model.is_broken = True
    with pytest.raises(RuntimeError, match="no memory left"):
        drafter.draft([row(0, text(34), 2, start=28), row(1, text(20, 1), 2)])
    model.is_broken = False
    answers = drafter.draft([row(0, text(34), 2, start=28), row(1, text(20, 1), 2)])
    assert answers == [
        Answer(34, greedy(reference, text(34), 2)),
        Answer(20, greedy(reference, text(20, 1), 2)),
    ]


def test_a_loaded_drafters_card_describes_its_model() -> None:
    drafter = CausalDrafter.load(MODEL, max_texts=2, max_tokens=100_000)
    card = drafter.card
    assert (card.kind, card.vocab_size, card.hidden_size) == ("draft_model", 4096, 0)
    assert card.max_tokens == 4096
    assert len(card.tokenizer) == 64
    assert len(drafter.draft([row(0, text(20), 3)])[0].tokens) == 3


def test_a_cache_larger_than_the_memory_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError, match=r"max_texts: 1000000 .* need 33,554,432,000,000 bytes"):
        CausalDrafter.load(MODEL, max_texts=1_000_000, max_tokens=4096)
