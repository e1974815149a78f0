"""Texts for the draft memory, from a file of JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from specserve.core.errors import ConfigError, SpecServeError

_FORMS = ({"text"}, {"prompt", "completion"}, {"token_ids"})
_KEYS = frozenset[str]().union(*_FORMS)
_ALLOWED = "a mapping with either text, or prompt and completion, or token_ids"


@dataclass(frozen=True, slots=True)
class WarmText:
    """One line: either two texts, of which the first may be empty, or tokens.

    Attributes:
        prompt: what was asked.
        completion: what was answered, or a text on its own.
        token_ids: tokens of a text on its own.
    """

    prompt: str = ""
    completion: str = ""
    token_ids: tuple[int, ...] = ()


def read_texts(path: Path, vocab_size: int) -> Iterator[WarmText]:
    """Reads ``{"text": ...}``, ``{"prompt": ..., "completion": ...}`` or ``{"token_ids": [...]}``.

    Other keys of a line, and blank lines, are passed over.

    Args:
        path: a file of JSON lines in UTF-8.
        vocab_size: token ids are below it.

    Raises:
        SpecServeError: the file cannot be read, or a line is none of these; says which, and why.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    text = _warm_text(msgspec.json.decode(line), vocab_size)
                except ConfigError as error:
                    raise SpecServeError(f"{path}: line {number}: {error}") from None
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    reason = f"not valid JSON: {error}"
                    raise SpecServeError(f"{path}: line {number}: {reason}") from None
                yield text
    except OSError as error:
        raise SpecServeError(f"{path}: cannot be read: {error.strerror}") from None


def _warm_text(value: Any, vocab_size: int) -> WarmText:
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
