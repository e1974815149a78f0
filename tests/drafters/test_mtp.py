"""The MTP drafter on the demo base's own hidden states."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from specserve.core.errors import ConfigError
from specserve.drafters.base import Answer, Key, Row
from specserve.drafters.kv_cache import Packed, Span
from specserve.drafters.mtp import MtpDrafter
from tests.drafters.mtp_reference import MODEL, NUM_TOKENS, texts

ROOM = NUM_TOKENS + 40
NUM_SLOTS = 4


@pytest.fixture(scope="module")
def loaded() -> Iterator[MtpDrafter]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield MtpDrafter.load(str(MODEL), max_texts=NUM_SLOTS, max_tokens=ROOM)
    torch.set_num_threads(before)


@pytest.fixture(params=["kernels", "torch"])
def drafter(loaded: MtpDrafter, request: pytest.FixtureRequest) -> MtpDrafter:
    """A drafter without texts. A read of an unwritten entry gives NaN."""
    assert loaded.kernels is not None
    loaded.module.attention.cache.fill_(torch.nan)
    kernels = loaded.kernels if request.param == "kernels" else None
    return MtpDrafter(loaded.module, loaded.card, NUM_SLOTS, kernels)


def key(number: int) -> Key:
    return (b"client", number)


def row(
    num_tokens: int,
    *,
    start: int = 0,
    states: tuple[int, int] | None = None,
    text: int = 0,
    number: int = 0,
    drafts: int = 1,
    salt: int = 7,
) -> Row:
    """Tokens ``start .. num_tokens - 1`` of a text, with their states but for the last one's.
    ``states`` gives another range of states."""
    begin, end = (start, num_tokens - 1) if states is None else states
    return Row(
        key=key(number),
        salt=salt,
        start=start,
        tokens=texts()[text].tokens[start:num_tokens],
        states_start=begin,
        states=texts()[text].states[begin:end],
        max_draft_tokens=drafts,
    )


def test_results_equal_those_of_the_training_code(drafter: MtpDrafter) -> None:
    text, end = texts()[0], NUM_TOKENS - 1
    each = Packed.of([Span(0, i, i + 1) for i in range(end)], torch.device("cpu"))
    with torch.inference_mode():
        ours = drafter.module.forward(
            torch.from_numpy(text.states[:end]),
            torch.from_numpy(text.tokens[1:]).long(),
            each,
            end,
        )
    expected = text.entries(end)
    assert (ours - expected).abs().max() < 2e-3
    assert expected.abs().max() > 1


def test_only_wanted_results_are_computed_and_all_entries_are_written(
    drafter: MtpDrafter,
) -> None:
    first, second = texts()[:2]
    spans = [Span(0, 0, 200), Span(1, 0, 150)]
    with torch.inference_mode():
        (result,) = drafter.module.forward(
            torch.from_numpy(np.concatenate([first.states[:200], second.states[:150]])),
            torch.from_numpy(np.concatenate([first.tokens[1:201], second.tokens[1:151]])).long(),
            Packed.of(spans, torch.device("cpu")),
            1,
        )
        (later,) = drafter.module.forward(
            torch.from_numpy(second.states[150:151]),
            torch.from_numpy(second.tokens[151:152]).long(),
            Packed.of([Span(1, 150, 151)], torch.device("cpu")),
            1,
        )
    assert (result - first.entries(200)[-1]).abs().max() < 2e-3
    assert (later - second.entries(151)[-1]).abs().max() < 2e-3


def test_a_growing_text_gets_the_drafts_of_the_training_code(drafter: MtpDrafter) -> None:
    text = texts()[0]
    assert drafter.draft([row(200)]) == [Answer(199, text.draft(200))]
    for num_tokens in range(202, 230, 3):
        growing = row(num_tokens, start=max(199, num_tokens - 4))
        assert drafter.draft([growing]) == [Answer(num_tokens - 1, text.draft(num_tokens))]


def test_later_draft_tokens_continue_the_modules_own_states(drafter: MtpDrafter) -> None:
    for num_tokens in (150, 153, 180):
        start = 0 if num_tokens == 150 else num_tokens - 4 if num_tokens == 153 else 152
        (answer,) = drafter.draft([row(num_tokens, start=start, drafts=3)])
        assert answer == Answer(num_tokens - 1, texts()[0].draft(num_tokens, 3))


def test_each_row_of_a_call_is_answered_as_if_alone(drafter: MtpDrafter) -> None:
    first = [row(30 + 90 * n, text=n, number=n, drafts=0) for n in range(3)]
    assert [answer.tokens for answer in drafter.draft(first)] == [(), (), ()]
    rows = [
        row(100, start=29, text=0, number=0, drafts=1),
        row(122, start=119, text=1, number=1, drafts=0),
        row(212, start=209, text=2, number=2, drafts=3),
        row(50, text=1, number=3, drafts=2),
    ]
    answers = drafter.draft(rows)
    assert answers == [
        Answer(99, texts()[0].draft(100)),
        Answer(121),
        Answer(211, texts()[2].draft(212, 3)),
        Answer(49, texts()[1].draft(50, 2)),
    ]


def test_a_prompt_may_come_in_pieces(drafter: MtpDrafter) -> None:
    whole = row(400)
    for begin, end in ((0, 130), (130, 131), (131, 398)):
        # The tokens are known at once, the states only piece by piece.
        piece = row(400, start=begin, states=(begin, end), drafts=0)
        assert drafter.draft([piece]) == [Answer(end)]
    last = row(400, start=398, states=(398, 399))
    assert drafter.draft([last]) == [Answer(399, texts()[0].draft(400))]
    assert drafter.draft([replace(whole, key=key(1))])[0].tokens == texts()[0].draft(400)


def test_a_text_in_pieces_reuses_the_prefix_of_another(drafter: MtpDrafter) -> None:
    drafter.draft([row(385)])
    drafter.module.attention.cache[1:].fill_(torch.nan)
    piece = replace(row(400, number=1), max_feed_tokens=8)
    assert drafter.draft([piece]) == [Answer(392)]  # 384 of the other, and 8 of its own
    rest = replace(row(400, number=1, start=392), max_feed_tokens=8)
    assert drafter.draft([rest]) == [Answer(399, texts()[0].draft(400))]


def test_a_repeated_row_gets_the_same_answer(drafter: MtpDrafter) -> None:
    drafter.draft([row(100)])
    again = row(103, start=99)
    first = drafter.draft([again])
    assert drafter.draft([again]) == first == [Answer(102, texts()[0].draft(103))]


def test_a_text_that_is_held_whole_needs_only_its_last_states(drafter: MtpDrafter) -> None:
    drafter.draft([row(193)])
    same = row(193, states=(176, 192), number=1)  # shares all of its 192 entries
    assert drafter.draft([same]) == [Answer(192, texts()[0].draft(193))]


def test_repeated_states_change_nothing(drafter: MtpDrafter) -> None:
    drafter.draft([row(100)])
    recomputed = row(103, start=99, states=(40, 102))
    assert drafter.draft([recomputed]) == [Answer(102, texts()[0].draft(103))]


@pytest.mark.parametrize("start", [50, 64])
def test_a_text_that_deviates_is_rolled_back(drafter: MtpDrafter, start: int) -> None:
    other, common = texts()[1], texts()[0]
    tokens = np.concatenate([common.tokens[:start], other.tokens[start:90]])
    states = np.concatenate([common.states[:start], other.states[start:89]])
    fresh = Row(key=key(1), salt=0, start=0, tokens=tokens, states=states, max_draft_tokens=3)
    expected = drafter.draft([fresh])
    drafter.draft([row(100)])
    # Entry start - 1 depends on the token at start, so its state is sent again.
    resumed = Row(
        key=key(0),
        salt=7,
        start=start,
        tokens=tokens[start:],
        states_start=start - 1,
        states=states[start - 1 :],
        max_draft_tokens=3,
    )
    assert drafter.draft([resumed]) == expected
    assert expected[0].begin == 0
    first, second = drafter.module.attention.cache[:2, :89]
    assert torch.allclose(first, second, atol=1e-4)


def test_a_text_whose_first_states_are_missing_begins_later(drafter: MtpDrafter) -> None:
    late = row(200, states=(160, 199), drafts=3)
    assert drafter.draft([late]) == [Answer(199, texts()[0].draft(200, 3, begin=160), begin=160)]
    grown = row(203, start=199)
    assert drafter.draft([grown]) == [Answer(202, texts()[0].draft(203, begin=160), begin=160)]


def test_a_text_begins_after_a_gap_between_states(drafter: MtpDrafter) -> None:
    drafter.draft([row(100)])
    gap = row(140, start=99, states=(120, 139))
    assert drafter.draft([gap]) == [Answer(139, texts()[0].draft(140, begin=120), begin=120)]


def test_a_partial_text_rolled_back_before_its_begin_starts_again(drafter: MtpDrafter) -> None:
    drafter.draft([row(200, states=(160, 199))])
    back = row(150, start=120, states=(120, 149), drafts=8)
    assert drafter.draft([back]) == [Answer(149, texts()[0].draft(150, 8, begin=120), begin=120)]


def test_missing_states_are_copied_from_a_text_of_the_same_prefix(drafter: MtpDrafter) -> None:
    drafter.draft([row(200)])
    hit = row(230, states=(192, 229), number=1, drafts=3)
    assert drafter.draft([hit]) == [Answer(229, texts()[0].draft(230, 3))]
    drafter.forget([key(0), key(1)])
    again = row(230, states=(224, 229), number=2)
    assert drafter.draft([again]) == [Answer(229, texts()[0].draft(230))]


def test_a_shared_prefix_need_not_be_sent(drafter: MtpDrafter) -> None:
    drafter.draft([row(193)])
    asked = row(200, number=1, states=(0, 0))
    assert drafter.draft([asked]) == [Answer(192)]
    rest = row(200, number=1, start=192)
    assert drafter.draft([rest]) == [Answer(199, texts()[0].draft(200))]


def test_texts_with_another_salt_or_first_token_share_nothing(drafter: MtpDrafter) -> None:
    drafter.draft([row(200)])
    asked = row(200, number=1, states=(0, 0))
    assert drafter.draft([replace(asked, salt=8)]) == [Answer(0)]
    tokens = asked.tokens.copy()
    tokens[0] += 1
    assert drafter.draft([replace(asked, key=key(2), tokens=tokens)]) == [Answer(0)]


def test_a_row_with_a_gap_gets_the_held_length(drafter: MtpDrafter) -> None:
    assert drafter.draft([row(103, start=99)]) == [Answer(0)]
    drafter.draft([row(100)])
    assert drafter.draft([row(120, start=110)]) == [Answer(99)]
    drafter.forget([key(0), key(5)])
    assert drafter.draft([row(103, start=99)]) == [Answer(0)]


def test_without_the_last_state_nothing_is_drafted(drafter: MtpDrafter) -> None:
    assert drafter.draft([row(100, states=(0, 98))]) == [Answer(98)]
    stateless = replace(row(100, start=98), states=None)
    assert drafter.draft([stateless]) == [Answer(98)]


def test_drafts_end_at_max_tokens(loaded: MtpDrafter) -> None:
    card = replace(loaded.card, max_tokens=100)
    drafter = MtpDrafter(loaded.module, card, NUM_SLOTS)
    assert drafter.draft([row(98, drafts=5)]) == [Answer(97, texts()[0].draft(98, 2))]
    assert drafter.draft([row(100, start=97)]) == [Answer(99)]
    assert drafter.draft([row(101, start=99)]) == [Answer(99)]
    assert drafter.draft([row(101, number=1)]) == [Answer(0)]


def test_a_text_without_a_free_slot_is_not_held(drafter: MtpDrafter) -> None:
    rows = [row(20 + number, number=number) for number in range(NUM_SLOTS + 1)]
    answers = drafter.draft(rows)
    assert [answer.held for answer in answers] == [19, 20, 21, 22, 0]
    assert drafter.draft(rows[-1:]) == [Answer(0)]
    drafter.forget([key(0)])
    assert drafter.draft(rows[-1:]) == [Answer(23, texts()[0].draft(24))]


def test_an_empty_text_affects_no_other_text(drafter: MtpDrafter) -> None:
    empty = replace(row(50, number=1), tokens=np.empty(0, np.int32), states=None)
    assert drafter.draft([empty, row(50)]) == [Answer(0), Answer(49, texts()[0].draft(50))]


def test_states_may_be_the_bits_of_bfloat16(drafter: MtpDrafter) -> None:
    states = torch.from_numpy(texts()[0].states[:149]).bfloat16()
    bits = states.view(torch.int16).numpy().view(np.uint16)
    bits.flags.writeable = False  # as they come from the wire
    as_floats = replace(row(150, number=1, salt=1, drafts=3), states=states.float().numpy())
    expected = drafter.draft([as_floats])
    assert drafter.draft([replace(row(150, drafts=3), states=bits)]) == expected
    assert expected[0].tokens


def copy_of_base(folder: Path, **changes: Any) -> str:
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"a checkpoint of DeepseekV3ForCausalLM, not"),
        ({"num_hidden_layers": 5}, r"a checkpoint with an MTP layer, model\.layers\.5\.\*"),
        ({"hidden_size": 128}, r"embed_tokens\.weight of shape \[4096, 128\], not \[4096, 256\]"),
        ({"hidden_size": "wide"}, r"a valid config\.json: .*hidden_size"),
        ({"moe_intermediate_size": 100}, r"size: 100 is not allowed; allowed: a multiple of 8"),
        ({"scoring_func": "softmax"}, r"scoring_func: 'softmax' is not allowed; allowed: sigmoid"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"rope_type: 'linear' is not allowed; allowed: default, yarn",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = copy_of_base(tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        MtpDrafter.load(folder, max_texts=1, max_tokens=64)
    assert "\n" not in str(caught.value)


def test_a_cache_that_does_not_fit_is_refused_with_its_bytes() -> None:
    with pytest.raises(ConfigError, match=r"max_texts: 1000000 .* 9,437,184,000,000 bytes"):
        MtpDrafter.load(str(MODEL), max_texts=1_000_000, max_tokens=4096)


def test_the_card_describes_the_module(loaded: MtpDrafter) -> None:
    card = loaded.card
    assert (card.kind, card.vocab_size, card.hidden_size) == ("mtp", 4096, 256)
    assert card.max_tokens == ROOM
    assert card.tokenizer
