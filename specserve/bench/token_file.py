"""Files of requests as token ids: one request per line, decimal ids separated by commas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specserve.core.errors import ConfigError, reason_of

TokenIds = tuple[int, ...]


def read_token_file(
    path: Path, *, max_tokens: int, vocab_size: int = 0, field: str = "FILE"
) -> list[TokenIds]:
    """Reads the requests of a file in its order; lines may end with CR LF.

    Args:
        path: the file, without a header.
        max_tokens: longest request that the model can continue.
        vocab_size: ids are below it; 0: unknown.
        field: the argument that named the file, for errors.

    Raises:
        ConfigError: the file cannot be read or has no request, or a line is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(field, str(path), f"a readable file ({reason_of(error)})") from None
    if not lines:
        raise ConfigError(field, str(path), "a file with at least one line")
    requests = []
    for number, line in enumerate(lines, 1):
        where = f"{path}: line {number}"
        tokens = parse_token_ids(line.decode("utf-8", "replace"), where, vocab_size)
        if len(tokens) > max_tokens:
            raise ConfigError(where, f"{len(tokens)} tokens", f"at most {max_tokens}")
        requests.append(tokens)
    return requests


def write_token_file(path: Path, requests: Sequence[Sequence[int]]) -> None:
    """Writes requests in the format of :func:`read_token_file`.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text("".join(f"{','.join(map(str, each))}\n" for each in requests))
    except OSError as error:
        allowed = f"a file that can be written ({reason_of(error)})"
        raise ConfigError("--record-output", str(path), allowed) from None


def parse_token_ids(line: str, where: str, vocab_size: int = 0) -> TokenIds:
    """Parses the token ids of one line.

    Raises:
        ConfigError: a word is not a token id; the error names ``where``.
    """
    allowed = f"a token id from 0 to {vocab_size - 1}" if vocab_size else "a token id from 0 on"
    tokens = []
    for word in line.split(","):
        text = word.strip()
        # `isdecimal` also accepts other scripts' digits, and `int` fails above 4300 digits.
        is_id = text.isascii() and text.isdecimal() and len(text) < 20
        if not is_id or (vocab_size and int(text) >= vocab_size):
            raise ConfigError(where, text[:40], f"{allowed}, separated by commas")
        tokens.append(int(text))
    return tuple(tokens)
