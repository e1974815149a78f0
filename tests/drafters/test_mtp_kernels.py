"""The MTP module's compiled kernels beside torch, and where they are not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from specserve.drafters.base import Answer, Row
from specserve.drafters.mtp import MtpDrafter
from tests.drafters.checkpoints import write_copy
from tests.drafters.mtp_reference import MODEL, NUM_TOKENS, texts

NUM_SLOTS = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(model: Path = MODEL) -> MtpDrafter:
    return MtpDrafter.load(str(model), max_texts=NUM_SLOTS, max_tokens=NUM_TOKENS + 40)


def rows(ends: Sequence[int], starts: Sequence[int], drafts: Sequence[int]) -> list[Row]:
    """Tokens ``start .. end - 1`` of the first texts, with the states of all but the last."""
    return [
        Row(
            key=(b"client", number),
            salt=1,
            start=start,
            tokens=texts()[number].tokens[start:end],
            states_start=start,
            states=texts()[number].states[start : end - 1],
            max_draft_tokens=num_drafts,
        )
        for number, (end, start, num_drafts) in enumerate(zip(ends, starts, drafts, strict=True))
    ]


def chances(answers: Sequence[Answer]) -> list[list[float]]:
    return [list(each.chances) for each in answers]


def test_a_batch_has_the_drafts_and_probabilities_of_torch() -> None:
    loaded = load()
    by_torch = MtpDrafter(load().module, loaded.card, NUM_SLOTS)
    num_texts = min(len(texts()), NUM_SLOTS)
    ends = [120 + 9 * number for number in range(num_texts)]
    read = rows(ends, [0] * num_texts, [0] * num_texts)
    assert loaded.draft(read) == by_torch.draft(read)
    more = rows(
        [end + 3 for end in ends], [end - 1 for end in ends], [4, 0, 1, 3, 4, 2][:num_texts]
    )
    ours, theirs = loaded.draft(more), by_torch.draft(more)
    assert ours == theirs
    assert [len(each.tokens) for each in ours] == [4, 0, 1, 3, 4, 2][:num_texts]
    for each, other in zip(chances(ours), chances(theirs), strict=True):
        assert each == pytest.approx(other, abs=1e-3)


def test_a_draft_from_invalid_states_has_no_probability() -> None:
    (row,) = rows([40], [0], [2])
    states = np.full_like(row.states, np.nan)
    invalid = Row(
        key=row.key, salt=1, start=0, tokens=row.tokens, states=states, max_draft_tokens=2
    )
    (answer,) = load().draft([invalid])
    assert answer.chances == (0.0, 0.0)


def test_torch_computes_with_several_threads() -> None:
    torch.set_num_threads(2)
    assert load().kernels is None


def test_torch_computes_weights_that_bfloat16_does_not_hold(tmp_path: Path) -> None:
    assert load().kernels is not None
    assert load(write_copy(tmp_path / "fp8", fp8=True)).kernels is None
