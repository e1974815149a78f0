from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import pytest
import torch
from tokenizers import Tokenizer

from specserve.compare.corpus import Module
from tools.demo_models import stream as stream_module
from tools.demo_models.completions import LOOP_MAX_PERIOD
from tools.demo_models.stream import Corpus, Position, StreamPool, TokenStream
from tools.demo_models.tokenizer import BOS_ID, END_ID


@pytest.fixture(scope="module")
def training(modules: list[Module], tokenizer: Tokenizer) -> Corpus:
    return Corpus(modules[:5], tokenizer)


def test_a_stream_continues_from_its_position(training: Corpus) -> None:
    stream = TokenStream(training, seed="3")
    stream.rows(2, 200)
    position = Position(**asdict(stream.position))
    expected = stream.rows(4, 150)
    again = TokenStream(training, seed="3")
    again.position = position
    assert torch.equal(again.rows(4, 150), expected)


def test_tasks_and_plain_code_get_half_of_the_tokens_each(training: Corpus) -> None:
    stream = TokenStream(training, seed="0")
    stream.rows(60, 256)
    tasks = stream.position.task_tokens
    assert 0.4 < tasks / (tasks + stream.position.plain_tokens) < 0.6


def test_an_epoch_shows_every_token_once(training: Corpus) -> None:
    stream = TokenStream(training, seed="0")
    epoch = sum(map(len, training.texts))
    while stream.position.epoch == 0:
        stream.rows(1, 128)
    assert epoch <= stream.position.plain_tokens <= epoch + 2 * 128


def test_a_drill_is_one_span_twice_and_no_loop(
    training: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "DRILL_CHANCE", 1.0)
    ids = TokenStream(training, seed="0").rows(1, 6000)[0].tolist()
    starts = [i for i, token in enumerate(ids) if token == BOS_ID]
    drills = [ids[i + 1 : ids.index(END_ID, i)] for i in starts[:-1]]
    assert len(drills) > 2
    for drill in drills:
        half = len(drill) // 2
        assert drill[:half] == drill[half:]
        assert half > LOOP_MAX_PERIOD
        assert max(Counter(drill[:half]).values()) < half


def test_a_pool_alternates_between_its_streams_in_any_shape(
    training: Corpus,
) -> None:
    pool = StreamPool([TokenStream(training, seed=str(i)) for i in range(2)])
    alone = [TokenStream(training, seed=str(i)) for i in range(2)]
    for turn, shape in enumerate([(2, 100), (2, 100), (2, 100), (1, 150), (1, 150)]):
        assert torch.equal(pool.rows(*shape), alone[turn % 2].rows(*shape))


def test_a_pool_continues_from_its_state(training: Corpus) -> None:
    pool = StreamPool([TokenStream(training, seed=str(i)) for i in range(2)])
    for _ in range(3):
        pool.rows(2, 100)
    state = pool.state_dict()
    expected = [pool.rows(2, 100) for _ in range(3)]
    again = StreamPool([TokenStream(training, seed=str(i)) for i in range(2)])
    again.load_state_dict(state)
    assert all(torch.equal(again.rows(2, 100), rows) for rows in expected)
