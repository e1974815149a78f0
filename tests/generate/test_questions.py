from __future__ import annotations

from pathlib import Path

import pytest

from specserve.core.errors import ConfigError
from specserve.generate.questions import (
    DEFAULT_TEXTS,
    Question,
    encode,
    end_token,
    num_new_tokens,
    read_questions,
)
from tests.generate.model import Echo


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.txt", b"one\r\n\n two\n", ["one", " two"]),
        ("a.jsonl", b'{"prompt": "one"}\n', ["one"]),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": "x"}]}',
            [[{"role": "user", "content": "x"}]],
        ),
        ("a.csv", b"1,2\r\n3", [(1, 2), (3,)]),
    ],
)
def test_a_file_has_texts_dialogues_or_token_ids(
    tmp_path: Path, name: str, content: bytes, found: list[Question]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_questions(Echo(), file=tmp_path / name) == found


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "--input-file: "),
        ("a.csv", b"", "--input-file: "),
        ("a.md", b"x", "a .jsonl or .txt file"),
        ("a.txt", b"one\n\xff", "a.txt: line 2: b'\\xff' is not allowed; allowed: UTF-8 text"),
        ("a.jsonl", b'{"prompt": "one"}\n{', "a.jsonl:2: '{' is not allowed"),
        ("a.csv", b"1\n128", "a.csv: line 2: '128' is not allowed; allowed: a token id from 0"),
        ("a.csv", b"1" + b",1" * 99, "a.csv: line 1: '100 tokens'"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_questions(Echo(), file=tmp_path / name)
    assert words in str(caught.value)


def test_arguments_are_texts_or_token_ids() -> None:
    assert read_questions(Echo(), texts=["one"]) == ["one"]
    assert read_questions(Echo(), token_ids=["1, 2", "3"]) == [(1, 2), (3,)]
    assert read_questions(Echo()) == list(DEFAULT_TEXTS)
    with pytest.raises(ConfigError, match="--input-ids: 'x' is not allowed"):
        read_questions(Echo(), token_ids=["1,x"])


def test_a_text_goes_through_the_chat_template_on_request() -> None:
    model = Echo()
    assert encode(model, "ab") == (97, 98)
    assert model.dialogues == []
    encode(model, "ab", as_chat=True, system="be kind")
    encode(model, [{"role": "user", "content": "x"}])
    assert model.dialogues == [["be kind", "ab"], ["x"]]
    assert encode(model, (5, 6), as_chat=True) == (5, 6)


def test_an_end_token_is_an_id_or_a_text_of_one_token() -> None:
    assert end_token(Echo(), "7") == 7
    assert end_token(Echo(), "x") == ord("x")
    for word in ("xy", "", "128"):
        with pytest.raises(ConfigError, match="--add-eos-token: "):
            end_token(Echo(), word)


@pytest.mark.parametrize(
    ("new", "length", "found"),
    [(None, None, 50), (7, None, 7), (None, 15, 5), (7, 12, 7), (7, 2, 7), (90, None, 90)],
)
def test_max_length_counts_the_prompt_and_max_new_tokens_wins(
    new: int | None, length: int | None, found: int
) -> None:
    assert num_new_tokens(10, 100, new, length, 50, "the prompt") == found


@pytest.mark.parametrize(
    ("prompt", "new", "length", "words"),
    [
        (10, None, 10, "--max-length: 10 is not allowed; allowed: more than the prompt's 10 tok"),
        (10, None, 101, "at most the model's 100"),
        (10, 91, None, "--max-new-tokens: 91 is not allowed; allowed: at most 90"),
        (
            100,
            None,
            None,
            "the prompt: '100 tokens' is not allowed; allowed: less than the model's",
        ),
    ],
)
def test_a_length_without_room_is_refused(
    prompt: int, new: int | None, length: int | None, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        num_new_tokens(prompt, 100, new, length, 50, "the prompt")
    assert words in str(caught.value)
