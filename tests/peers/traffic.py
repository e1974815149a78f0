"""A population that asks about the same files again, as requests in the order of their coming."""

from __future__ import annotations

import random

from tests.peers.sources import Sources
from tests.peers.texts import Text
from tests.peers.workload import edited

NUM_FILES, FILE_TOKENS = 96, 1400
NUM_USERS, FILES_PER_USER = 64, 8
PLACES = 4
"""Where in a file a question may begin."""

PROMPT_TOKENS, OUTPUT_TOKENS = 350, 150
OF_THE_USER, OF_THE_REQUEST = 0.04, 0.02
"""Shares of a file's lines that differ in each user's version of it, and in each request."""


def traffic(sources: Sources, num_requests: int, seed: int) -> list[Text]:
    """Each request is a piece of a user's version of one of the user's files, edited once more.

    Files are the more popular the earlier they stand (Zipf). The first 350 tokens of the piece are
    the prompt, the next 150 what the model writes.
    """
    rng = random.Random(seed)
    files = [text.splitlines(keepends=True) for text in sources.excerpts(NUM_FILES, FILE_TOKENS)]
    popularity = [1 / (rank + 1) for rank in range(NUM_FILES)]
    users = [
        {
            number: edited(files[number], OF_THE_USER, rng)
            for number in rng.choices(range(NUM_FILES), popularity, k=FILES_PER_USER)
        }
        for _ in range(NUM_USERS)
    ]
    pieces = []
    for _ in range(num_requests):
        lines = rng.choice(list(rng.choice(users).values()))
        begin = len(lines) * rng.randrange(PLACES) // (PLACES + 2)
        pieces.append("".join(edited(lines[begin:], OF_THE_REQUEST, rng)))
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    return [
        Text(f"request-{number}", tokens[:length], PROMPT_TOKENS)
        for number, tokens in enumerate(sources.encoded(pieces))
        if len(tokens) >= length
    ]
