"""Questions on long documents that are already installed: licences, and Python's manual."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from specserve.compare.corpus import standard_library
from specserve.compare.tasks import Message, message

MIN_CHARS = 4000

_SYSTEM_LICENCES = Path("/usr/share/common-licenses")  # on Debian and its derivatives

_QUESTIONS = (
    "Summarize this document in five sentences.",
    "Which terms does this document define? Quote each definition.",
    "Print the paragraph of this document that begins with `{beginning}`, word for word.",
    "Which conditions and exceptions does this document name? Quote them.",
)


def load_documents() -> list[str]:
    """Texts of at least ``MIN_CHARS`` characters: licences, then pages of Python's manual."""
    files = [standard_library() / "LICENSE.txt", *sorted(_SYSTEM_LICENCES.glob("*"))]
    licences = [
        each.read_text(encoding="utf-8", errors="replace") for each in files if each.is_file()
    ]
    manual = [topics[name] for name in sorted(topics)]
    # `fromkeys` removes duplicates: some licences have two names in that folder.
    return [text for text in dict.fromkeys([*licences, *manual]) if len(text) >= MIN_CHARS]


def ask(documents: Sequence[str], number: int, rng: random.Random, max_chars: int) -> list[Message]:
    """A dialogue of one question and a part of a document of at most ``max_chars`` characters.

    ``number`` selects the question in rotation; ``rng`` draws the document and the part.
    """
    paragraphs = [each for each in rng.choice(documents).split("\n\n") if each.strip()]
    start = rng.randrange(len(paragraphs))
    part: list[str] = []
    for each in paragraphs[start:]:
        if sum(map(len, part)) + len(each) > max_chars:
            break
        part.append(each)
    beginning = " ".join((rng.choice(part) if part else "").split()[:5])
    question = _QUESTIONS[number % len(_QUESTIONS)].format(beginning=beginning)
    return [message("user", "\n\n".join([question, *part]))]
