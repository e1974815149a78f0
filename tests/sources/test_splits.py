"""A text is split as it was written at this place before, else as by the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specserve.core.token_texts import TokenTexts
from specserve.sources.splits import (
    LAST,
    MAX_PLACES,
    ONLY_ONE,
    UNUSUAL,
    USUAL,
    WRITTEN,
    Splits,
)

TOKENS = [b"", b"n", b"a", b"m", b"e", b"na", b"me", b"nam", b"name", b"_", b":", b"x", b"<end>"]
ID = {text: token for token, text in enumerate(TOKENS)}
BEFORE = 11
(_, LONG), (_, SHORT) = WRITTEN


def ids(*texts: bytes) -> list[int]:
    return [ID[text] for text in texts]


class Model:
    """A model that writes texts, with the learned splits."""

    def __init__(self) -> None:
        self.splits = Splits()
        self.texts = TokenTexts(TOKENS, special=ids(b"<end>"))
        self.num_tokenized = 0

    def writes(self, text: bytes, *split: bytes, owner: str = "") -> None:
        before = BEFORE
        for token in ids(*split):
            self.splits.note(owner, before, text, token)
            text, before = text[len(TOKENS[token]) :], token

    def split(
        self, text: bytes, usual: Sequence[bytes] = (), *, owner: str = "", limit: int = 99
    ) -> list[tuple[bytes, float]]:
        def tokenize() -> list[int]:
            self.num_tokenized += 1
            return ids(*usual)

        found = self.splits.split(owner, BEFORE, text, self.texts, tokenize, limit)
        return [(TOKENS[token], sure) for token, sure in found]


@pytest.fixture
def model() -> Model:
    return Model()


def test_a_new_text_is_split_as_by_the_tokenizer(model: Model) -> None:
    split = model.split(b"name_name:", (b"na", b"me", b"_", b"name", b":"))
    assert split == [
        (b"na", USUAL),
        (b"me", USUAL),
        (b"_", ONLY_ONE),
        (b"name", USUAL),
        (b":", LAST),
    ]
    assert model.num_tokenized == 1


def test_a_text_that_was_written_before_is_split_the_same_way_again(
    model: Model,
) -> None:
    model.writes(b"name_", b"n", b"a", b"me", b"_")
    expected = [(b"n", LONG), (b"a", LONG), (b"me", LONG), (b"_", LONG)]
    assert model.split(b"name_") == expected
    assert model.num_tokenized == 0
    assert model.split(b"name_", limit=2) == expected[:2]
    assert model.split(b"name_", limit=0) == []


def test_the_last_written_split_wins(model: Model) -> None:
    model.writes(b"name_", b"n", b"a", b"me", b"_")
    model.writes(b"name_", b"name", b"_")
    assert model.split(b"name_")[0] == (b"name", LONG)


def test_a_place_is_recognized_by_the_texts_next_four_bytes(model: Model) -> None:
    model.writes(b"namename", b"nam")
    assert model.split(b"name____", (b"name",))[0] == (b"nam", SHORT)
    assert model.split(b"nam____", (b"na",))[0] == (b"na", USUAL)


def test_after_leaving_the_tokenizers_split_the_longest_token_is_taken(model: Model) -> None:
    model.writes(b"namename", b"n")
    split = model.split(b"namename_", (b"name", b"name", b"_"))
    assert split[:2] == [(b"n", LONG), (b"a", ONLY_ONE)]
    assert split[2:] == [(b"me", UNUSUAL), (b"name", USUAL), (b"_", LAST)]


def test_a_split_ends_where_no_token_matches(model: Model) -> None:
    assert model.split(b"na?", (b"na",)) == [(b"na", USUAL)]
    assert model.split(b"<end>") == []


def test_a_split_is_used_only_for_its_owner(model: Model) -> None:
    model.writes(b"name_", b"n", b"a", owner="a")
    assert model.split(b"name_", (b"name",), owner="b")[0] == (b"name", USUAL)
    assert model.split(b"name_", (b"name",), owner="a")[0] == (b"n", LONG)


def test_the_last_of_several_tokens_with_one_text_is_used() -> None:
    texts = TokenTexts([b"a", b"b", b"a"])
    assert texts.beginnings(b"ab") == [2]
    assert [texts.size(token, b"ab") for token in range(3)] == [1, 0, 1]


def test_a_full_table_evicts_the_oldest_place(
    model: Model,
) -> None:
    owners = [f"{number}" for number in range(MAX_PLACES // len(WRITTEN))]
    for owner in owners:
        model.writes(b"name_name", b"na", owner=owner)
    assert {model.split(b"name_name", owner=owner, limit=1)[0] for owner in owners} == {
        (b"na", LONG)
    }
    model.writes(b"name_name", b"na", owner="one more")
    assert model.split(b"name_name", owner=owners[0], limit=1) == [(b"name", UNUSUAL)]
    assert model.split(b"name_name", owner=owners[1], limit=1) == [(b"na", LONG)]
