"""Requests of many users who ask about the same files again, in order of arrival."""

from __future__ import annotations

import random

from tests.peers.sources import Sources
from tests.peers.texts import Text
from tests.peers.workload import edited

NUM_FILES, FILE_TOKENS = 96, 1400
NUM_USERS, FILES_PER_USER = 64, 8
PLACES = 4
"""Number of places in a file where a question may begin."""

PROMPT_TOKENS, OUTPUT_TOKENS = 350, 150
USER_CHANGES, REQUEST_CHANGES = 0.04, 0.02
"""Shares of a file's lines that differ in each user's version, and in each request."""


def traffic(sources: Sources, num_requests: int, seed: int) -> list[Text]:
    """Each request is a piece of a file in a user's version, edited once more.

    Earlier files are more popular (Zipf). The first 350 tokens of the piece are the prompt, and the
    next 150 are the model's output.
    """
    rng = random.Random(seed)
    files = [text.splitlines(keepends=True) for text in sources.excerpts(NUM_FILES, FILE_TOKENS)]
    popularity = [1 / (rank + 1) for rank in range(NUM_FILES)]
    users = [
        {
            number: edited(files[number], USER_CHANGES, rng)
            for number in rng.choices(range(NUM_FILES), popularity, k=FILES_PER_USER)
        }
        for _ in range(NUM_USERS)
    ]
    pieces = []
    for _ in range(num_requests):
        lines = rng.choice(list(rng.choice(users).values()))
        begin = len(lines) * rng.randrange(PLACES) // (PLACES + 2)
        pieces.append("".join(edited(lines[begin:], REQUEST_CHANGES, rng)))
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    return [
        Text(f"request-{number}", tokens[:length], PROMPT_TOKENS)
        for number, tokens in enumerate(sources.encoded(pieces))
        if len(tokens) >= length
    ]
