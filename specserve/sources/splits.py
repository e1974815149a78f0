"""Predicts how a model splits a forced text into tokens.

The grammar fixes the text, but not its tokens: ``name`` may be one token or four. The best guess is
the token that the model wrote in the same place before; the next best is the tokenizer's split. A
place is the previous token and the next bytes of the text. The lookup backs off from 8 bytes to 4,
as an n-gram model does (Katz, Estimation of Probabilities from Sparse Data, 1987).

A table maps the hash of a place to the token that was last written there. A full table evicts the
place that was written longest ago. The hash includes the owner, so that owners never share an
entry, and the table holds no text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from specserve.core.token_texts import TokenTexts

WRITTEN = ((8, 0.95), (4, 0.8))
"""Number of next bytes that identify a place, and the confidence in the token written there."""

ONLY_ONE, USUAL, LAST, UNUSUAL = 1.0, 0.9, 0.5, 0.3
"""Confidence in a token that was not written there before: no other token begins the text; it is in
the tokenizer's split; upper bound if it ends the text, since the model may write a longer one; it
is the longest token and no token of the tokenizer's split begins here."""

MAX_PLACES = 1 << 16
"""Most entries of the table."""


class Splits:
    """Learns splits and predicts them. Memory: at most 11 MB."""

    def __init__(self) -> None:
        self._written: OrderedDict[int, int] = OrderedDict()

    def note(self, owner: Hashable, before: int, text: bytes, token: int) -> None:
        """Records that the model wrote ``token`` after ``before``, as the beginning of ``text``."""
        for size, _ in WRITTEN:
            place = _place(owner, before, text[:size])
            self._written[place] = token
            self._written.move_to_end(place)
        while len(self._written) > MAX_PLACES:
            self._written.popitem(last=False)

    def split(
        self,
        owner: Hashable,
        before: int,
        text: bytes,
        texts: TokenTexts,
        usual: Callable[[], list[int]],
        limit: int,
    ) -> list[tuple[int, float]]:
        """The predicted first tokens of a text, each with its confidence.

        Args:
            owner: only its own recorded tokens are used.
            before: the token before the text.
            text: the forced text.
            texts: of the vocabulary.
            usual: makes the tokenizer's split; called at most once, if a place is unknown.
            limit: most tokens.
        """
        found: list[tuple[int, float]] = []
        starts: dict[int, int] | None = None
        at = 0
        while at < len(text) and len(found) < limit:
            rest = text[at:]
            guess = self._recall(owner, before, rest, texts)
            if guess is None:
                if starts is None:
                    starts = _starts(usual(), text, texts)
                guess = _guess(rest, starts.get(at), texts)
            if guess is None:
                break
            found.append(guess)
            before, _ = guess
            at += texts.size(before, rest)
        return found

    def _recall(
        self, owner: Hashable, before: int, text: bytes, texts: TokenTexts
    ) -> tuple[int, float] | None:
        for size, sure in WRITTEN:
            token = self._written.get(_place(owner, before, text[:size]))
            if token is not None and texts.size(token, text):
                return token, sure
        return None


def _place(owner: Hashable, before: int, text: bytes) -> int:
    return hash((owner, before, text))


def _starts(tokens: list[int], text: bytes, texts: TokenTexts) -> dict[int, int]:
    """The tokens of a split by their start in the text; tokens that do not match are left out."""
    starts, at = {}, 0
    for token in tokens:
        if size := texts.size(token, text[at:]):
            starts[at] = token
            at += size
    return starts


def _guess(text: bytes, usual: int | None, texts: TokenTexts) -> tuple[int, float] | None:
    """A first token of the text and its confidence: the tokenizer's, else the longest; or None."""
    beginnings = texts.beginnings(text)
    if not beginnings:
        return None
    token, sure = beginnings[-1], UNUSUAL
    if usual is not None:
        token, sure = usual, USUAL
    if len(beginnings) == 1:
        sure = ONLY_ONE
    if texts.size(token, text) == len(text):
        sure = min(sure, LAST)
    return token, sure
