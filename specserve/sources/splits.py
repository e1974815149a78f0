"""How a model splits texts into tokens that are given to it: as it has written them before.

A forced text has one spelling and many splits: ``name`` may be one token, or four. The model
decides. What it wrote before in the same place is the best guess, and its tokenizer's split the
next best. A place is the token before it and the text's next bytes, as in an n-gram model that
backs off (Katz, Estimation of Probabilities from Sparse Data, 1987).

Kept is a table from a place's hash to the token that was written there last. Where it is full, the
place written longest ago goes. It holds no text. Whose place it is belongs to the hash: nobody's
drafts are others' splits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from specserve.core.token_texts import TokenTexts

WRITTEN = ((8, 0.95), (4, 0.8))
"""Next bytes that make a place, and the confidence in the token that was written there."""

ONLY_ONE, USUAL, LAST, UNUSUAL = 1.0, 0.9, 0.5, 0.3
"""Confidence in a token that was not written there yet: no other one begins the text; the tokenizer
has it there; it ends the text, so that the model may write the beginning of a longer one; it is the
longest one where the tokenizer's split has been left."""

MOST_PLACES = 1 << 16


class Splits:
    """What was written where. Memory: at most 11 MB."""

    def __init__(self) -> None:
        self._written: OrderedDict[int, int] = OrderedDict()

    def note(self, owner: Hashable, before: int, text: bytes, token: int) -> None:
        """The model has written ``token`` behind ``before``, where the rest to write was ``text``.

        Nobody but the ``owner`` of the text drafts by that.
        """
        for size, _ in WRITTEN:
            place = _place(owner, before, text[:size])
            self._written[place] = token
            self._written.move_to_end(place)
        while len(self._written) > MOST_PLACES:
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
        """The first tokens of a text, and how sure each is.

        Args:
            owner: whose text it is.
            before: the token before it.
            text: what is to be written.
            texts: of the vocabulary.
            usual: makes the tokenizer's split; called where something was not written before.
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
    """The tokens of a split by where they begin, as far as they are the text's."""
    starts, at = {}, 0
    for token in tokens:
        if size := texts.size(token, text[at:]):
            starts[at] = token
            at += size
    return starts


def _guess(text: bytes, usual: int | None, texts: TokenTexts) -> tuple[int, float] | None:
    """The text's first token: the usual one if it is one, else the longest."""
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
