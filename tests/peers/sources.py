"""Texts for benchmarks of a memory: Python files of the installed packages, as tokens."""

from __future__ import annotations

import keyword
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specserve.core.types import Int32Array

MIN_BYTES, MAX_BYTES = 3_000, 60_000
_FILES_AT_ONCE = 64
_NOT_NAMES = {*keyword.kwlist, "self", "the", "and"}


class Sources:
    """Files in an order that the seed chooses. Each is used once.

    No parameter was tuned on them. Another seed gives other files.

    Args:
        tokenizer: tokenizer for the files.
        seed: seed of the order.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        root = Path(sysconfig.get_path("purelib"))
        paths = [p for p in sorted(root.rglob("*.py")) if _is_fit(p)]
        random.Random(seed).shuffle(paths)
        self._paths = iter(paths)

    def texts(self, num_tokens: int) -> list[Int32Array]:
        """The next files, with at least ``num_tokens`` tokens together."""
        found: list[Int32Array] = []
        while num_tokens > 0:
            for text in self.encoded(self._read(_FILES_AT_ONCE)):
                if num_tokens > 0:
                    found.append(text)
                    num_tokens -= len(text)
        return found

    def excerpts(self, number: int, num_tokens: int) -> list[str]:
        """The first ``num_tokens`` tokens of each of the next files. Shorter files are skipped."""
        found: list[str] = []
        while len(found) < number:
            for text in self.encoded(self._read(_FILES_AT_ONCE)):
                if len(text) >= num_tokens:
                    found.append(self._tokenizer.decode(text[:num_tokens].tolist()))
        return found[:number]

    def renamed(self, number: int, num_tokens: int) -> list[tuple[Int32Array, Int32Array]]:
        """Pairs of an excerpt and the same excerpt with its most frequent name replaced."""
        texts = self.excerpts(number, num_tokens)
        return list(
            zip(self.encoded(texts), self.encoded([_rename(each) for each in texts]), strict=True)
        )

    def encoded(self, texts: list[str]) -> Iterator[Int32Array]:
        """Tokens of the texts."""
        for each in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield np.array(each.ids, np.int32)

    def _read(self, number: int) -> list[str]:
        found: list[str] = []
        for path in self._paths:
            found.append(path.read_text(encoding="utf-8", errors="ignore"))
            if len(found) == number:
                return found
        raise ValueError("too few Python files are installed for this benchmark")


def _rename(text: str) -> str:
    names = (name for name in re.findall(r"\b[a-z_]{3,}\b", text) if name not in _NOT_NAMES)
    [(name, _)] = Counter(names).most_common(1)
    return re.sub(rf"\b{name}\b", "renamed", text)


def _is_fit(path: Path) -> bool:
    return MIN_BYTES <= path.stat().st_size <= MAX_BYTES
