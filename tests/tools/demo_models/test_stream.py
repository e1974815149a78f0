from __future__ import annotations

from dataclasses import asdict

import torch
from tokenizers import Tokenizer

from specserve.compare.corpus import Module
from tools.demo_models.stream import Position, TokenStream


def test_a_stream_continues_from_its_position(modules: list[Module], tokenizer: Tokenizer) -> None:
    stream = TokenStream(modules[:5], tokenizer, seed="3")
    stream.rows(2, 200)
    position = Position(**asdict(stream.position))
    expected = stream.rows(4, 150)
    again = TokenStream(modules[:5], tokenizer, seed="3")
    again.position = position
    assert torch.equal(again.rows(4, 150), expected)


def test_tasks_and_plain_code_get_half_of_the_tokens_each(
    modules: list[Module], tokenizer: Tokenizer
) -> None:
    stream = TokenStream(modules[:5], tokenizer, seed="0")
    stream.rows(60, 256)
    tasks = stream.position.task_tokens
    assert 0.4 < tasks / (tasks + stream.position.plain_tokens) < 0.6


def test_an_epoch_shows_every_token_once(modules: list[Module], tokenizer: Tokenizer) -> None:
    stream = TokenStream(modules[:5], tokenizer, seed="0")
    epoch = sum(len(tokenizer.encode(m.text, add_special_tokens=False)) + 2 for m in modules[:5])
    while stream.position.epoch == 0:
        stream.rows(1, 128)
    assert epoch <= stream.position.plain_tokens <= epoch + 2 * 128
