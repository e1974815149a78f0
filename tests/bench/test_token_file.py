from __future__ import annotations

from pathlib import Path

import pytest

from specserve.bench.token_file import read_token_file, write_token_file
from specserve.core.errors import ConfigError


def test_a_written_file_can_be_read(tmp_path: Path) -> None:
    write_token_file(tmp_path / "out.csv", [(1, 22), (333,)])
    assert read_token_file(tmp_path / "out.csv", max_tokens=2) == [(1, 22), (333,)]


def test_lines_may_have_carriage_returns_and_spaces(tmp_path: Path) -> None:
    path = tmp_path / "tokens.csv"
    path.write_bytes(b"1, 2\r\n3")
    assert read_token_file(path, max_tokens=2) == [(1, 2), (3,)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "a file with at least one line"),
        (b"1\n2,x\n", "line 2: 'x' is not allowed; allowed: a token id from 0 to 99"),
        (b"1\n\n3\n", "line 2: '' is not allowed"),
        (b"1,,2", "line 1: '' is not allowed"),
        (b"-1", "line 1: '-1' is not allowed"),
        (b"100", "line 1: '100' is not allowed; allowed: a token id from 0 to 99"),
        ("\u0661".encode(), "line 1: "),
        (b"\xff", "line 1: "),
        (b"1\n" + b"9" * 5000, f"line 2: '{'9' * 40}' is not allowed"),
        (b"1\n1,2,3,4", "line 2: '4 tokens' is not allowed; allowed: at most 3"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number_and_the_rule(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "tokens.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_token_file(path, max_tokens=3, vocab_size=100)
    assert words in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a readable file"):
        read_token_file(tmp_path / "none.csv", max_tokens=3)
