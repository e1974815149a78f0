from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve.core.errors import SpecServeError
from specserve.trie.warm_texts import WarmText, read_file

GOOD = {"text": "a"}


def write(folder: Path, *lines: object) -> Path:
    """Writes these lines to a file, as JSON if they are not bytes."""
    path = folder / "texts.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(texts))
    return path


def test_each_form_of_a_line_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"text": "über\n", "id": 7},
        {"prompt": "a", "completion": "b"},
        b"  ",
        {"token_ids": [0, 99]},
    )
    assert list(read_file(path, 100)) == [
        WarmText(completion="über\n"),
        WarmText(prompt="a", completion="b"),
        WarmText(token_ids=(0, 99)),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "line: '{' is not allowed; allowed: valid JSON ("),
        (b"\xff", "line: '\ufffd' is not allowed; allowed: valid JSON ("),
        (b'{"text": "\xff"}', """line: '{"text": "\ufffd"}' is not allowed; allowed: valid"""),
        (b'{"text": "\\ud800"}', """line: '{"text": "\\\\ud800"}' is not allowed; allowed: v"""),
        (b'{"text": ' + b"[" * 100_000, """line: '{"text": [["""),
        ([], "line: [] is not allowed; allowed: a mapping with either text, or prompt and"),
        ({}, "line: {} is not allowed"),
        ({"prompt": "a"}, "line: {'prompt': 'a'} is not allowed"),
        ({"text": "a", "token_ids": [1]}, "line: {'text': 'a', "),
        ({"text": ""}, "text: '' is not allowed; allowed: a text that is not empty"),
        ({"text": 1}, "text: 1 is not allowed"),
        ({"prompt": "a", "completion": None}, "completion: None is not allowed"),
        ({"token_ids": []}, "token_ids: [] is not allowed; allowed: a list that is not empty"),
        ({"token_ids": "1"}, "token_ids: '1' is not allowed"),
        ({"token_ids": [1, 100]}, "token_ids.1: 100 is not allowed; allowed: an integer 0 .. 99"),
        ({"token_ids": [-1]}, "token_ids.0: -1 is not allowed"),
        ({"token_ids": [1.0]}, "token_ids.0: 1.0 is not allowed"),
        ({"token_ids": [True]}, "token_ids.0: True is not allowed"),
    ],
)
def test_a_wrong_line_is_refused_with_file_line_and_reason(
    tmp_path: Path, line: object, problem: str
) -> None:
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(SpecServeError) as caught:
        list(read_file(path, 100))
    assert str(caught.value).startswith(f"{path}: line 2: {problem}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecServeError, match="cannot be read: No such file or directory"):
        list(read_file(tmp_path / "none.jsonl", 100))
