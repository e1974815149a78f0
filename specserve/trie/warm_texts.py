"""Reads texts for the draft memory from JSON Lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specserve.core.errors import ConfigError, SpecServeError
from specserve.core.types import Int32Array

_FORMS = ({"text"}, {"prompt", "completion"}, {"token_ids"})
_KEYS = frozenset[str]().union(*_FORMS)
_ALLOWED = "a mapping with either text, or prompt and completion, or token_ids"


@dataclass(frozen=True, slots=True)
class WarmText:
    """One line: a completion with its prompt, which may be empty; or the tokens of a text."""

    prompt: str = ""
    completion: str = ""
    token_ids: tuple[int, ...] = ()

    def tokens(self, tokenizer: Any) -> Int32Array:
        """The text's tokens, int32 ``[n]``.

        As in a request, the tokenizer (of transformers) adds special tokens to the prompt only.
        """
        if self.token_ids:
            return np.array(self.token_ids, np.int32)
        prompt = tokenizer.encode(self.prompt) if self.prompt else []
        answer = tokenizer.encode(self.completion, add_special_tokens=False)
        return np.array([*prompt, *answer], np.int32)


def read_file(path: Path, vocab_size: int) -> Iterator[WarmText]:
    """Reads a file as :func:`read_texts` does.

    Raises:
        SpecServeError: the file cannot be read, or a line is wrong.
    """
    try:
        with path.open("rb") as file:
            for _, text in read_texts(file, vocab_size):
                yield text
    except OSError as error:
        raise SpecServeError(f"{path}: cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise SpecServeError(f"{path}: {error}") from None


def read_texts(lines: Iterable[bytes], vocab_size: int) -> Iterator[tuple[int, WarmText]]:
    """Reads ``{"text": ...}``, ``{"prompt": ..., "completion": ...}`` or ``{"token_ids": [...]}``.

    Other keys and blank lines are ignored.

    Args:
        lines: JSON in UTF-8.
        vocab_size: limit of the token ids, exclusive.

    Yields:
        The number of the line, from 1, and its text.

    Raises:
        ConfigError: a line has none of these forms; the error's field names the line.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = _warm_text(line, vocab_size)
        except ConfigError as error:
            field = f"line {number}: {error.field}"
            raise ConfigError(field, error.value, error.allowed) from None
        yield number, text


def _warm_text(line: bytes, vocab_size: int) -> WarmText:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = line.strip()[:80].decode(errors="replace")
        raise ConfigError("line", shown, f"valid JSON ({error})") from None
    keys = value.keys() & _KEYS if isinstance(value, dict) else set()
    if keys not in _FORMS:
        raise ConfigError("line", value, _ALLOWED)
    if "token_ids" in keys:
        return WarmText(token_ids=_tokens(value["token_ids"], vocab_size))
    for key in sorted(keys):
        if not isinstance(value[key], str) or not value[key]:
            raise ConfigError(key, value[key], "a text that is not empty")
    return WarmText(value.get("prompt", ""), value.get("text") or value["completion"])


def _tokens(value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError("token_ids", value, "a list that is not empty")
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(f"token_ids.{index}", token, f"an integer 0 .. {vocab_size - 1}")
    return tuple(value)
