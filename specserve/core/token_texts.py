"""The texts of a vocabulary's tokens, as bytes: a token may be a part of a character."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class TokenTexts:
    """Finds the tokens that a text begins with, given the text of each token id.

    ``special`` tokens have no text.
    """

    def __init__(self, texts: Sequence[bytes], special: Collection[int] = ()) -> None:
        self._texts = list(texts)
        for token in special:
            self._texts[token] = b""
        # If several tokens have one text, the last one wins: the first ones are byte tokens.
        self._tokens = {text: token for token, text in enumerate(self._texts) if text}
        self._longest = max(map(len, self._tokens), default=0)

    def size(self, token: int, text: bytes) -> int:
        """Bytes of the token at the start of the text; 0: the text does not begin with it."""
        piece = self._texts[token]
        return len(piece) if text.startswith(piece) else 0

    def beginnings(self, text: bytes) -> list[int]:
        """The tokens that the text begins with, the shortest one first."""
        sizes = range(1, min(self._longest, len(text)) + 1)
        found = (self._tokens.get(text[:size]) for size in sizes)
        return [token for token in found if token is not None]
