"""Sampled output has the same distribution with speculation as without.

The model may write four tokens only, and the prompt and the prediction are long mixtures of them,
so that after every token there is a draft. Or its text is forced, and each sample splits it into
tokens in another way. The first tokens of many samples are then counted with and without
speculation, and Pearson's chi-square test asks whether one distribution can have made both tables.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pkgutil import resolve_name

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from specserve.compare.engine_process import EngineProcess
from specserve.core.config import AppConfig
from specserve.core.types import DraftBatch, RequestControls
from specserve.engine.generation import Completion, Job, RunResult, Sampling
from specserve.sources.base import SourceContext
from tests.integration.offline.conftest import running_engine

ALPHABET = (300, 301, 302, 303)
NUM_SAMPLES = 2000
NUM_TOKENS = 4
"""Tokens a sample: one from the prompt alone, then three that drafts are made for."""
SMALLEST_P = {"ngram": 1e-3, "prediction": 1e-3, "grammar": 1e-5}
"""The seeds are fixed: a fair sampler fails one fixed test in a thousand, for ever or never. But
grammars are compiled in a thread, so that the first drafts differ from run to run."""

Sample = tuple[int, ...]

PROMPT, PREDICTION = (tuple(random.Random(seed).choices(ALPHABET, k=60)) for seed in (0, 1))
FORCED = json.dumps({"const": "".join(random.Random(2).choices("aeinrst ", k=100))})
"""A schema with one answer. Its text can be split into tokens in many ways."""


def p_values(left: Sequence[Sample], right: Sequence[Sample]) -> dict[str, float]:
    """For each position, and for the drafted positions together, how likely two tables as
    different as these are if both come from the same distribution."""
    values = {}
    for position in range(NUM_TOKENS):
        values[f"position {position}"] = _p_value(
            [(sample[position],) for sample in left], [(sample[position],) for sample in right]
        )
    values["joint"] = _p_value([s[1:] for s in left], [s[1:] for s in right])
    return values


def _p_value(left: Sequence[Sample], right: Sequence[Sample]) -> float:
    counts = Counter(left), Counter(right)
    both = counts[0] + counts[1]
    # The test holds for cells that are expected to hold 5 or more; rarer ones share a cell.
    frequent = sorted(cell for cell, count in both.items() if count >= 10)
    table = [[count[cell] for cell in frequent] for count in counts]
    rest = [sum(count.values()) - sum(row) for count, row in zip(counts, table, strict=True)]
    if sum(rest) >= 10:
        table = [[*row, other] for row, other in zip(table, rest, strict=True)]
    return float(chi2_contingency(np.array(table)).pvalue)


def jobs(source: str, first_seed: int) -> list[Job]:
    """What the source has something to draft from."""
    is_forced = source == "grammar"
    return [
        Job(
            PROMPT,
            Sampling(
                max_tokens=NUM_TOKENS + 1,  # no draft is made for the last one
                temperature=1.0,
                seed=first_seed + index,
                ignore_eos=True,
                allowed_token_ids=() if is_forced else ALPHABET,
                prediction=PREDICTION,
                json_schema=FORCED if is_forced else "",
            ),
        )
        for index in range(NUM_SAMPLES)
    ]


def samples(result: RunResult) -> list[Sample]:
    def tokens(completion: Completion) -> Sample:
        assert len(completion.token_ids) == NUM_TOKENS + 1
        return completion.token_ids[:NUM_TOKENS]

    return [tokens(completion) for completion in result.completions]


@pytest.fixture(scope="module")
def without(none_engine: EngineProcess) -> Callable[[str], list[Sample]]:
    """Without speculation, by the source whose drafts these are compared with."""

    @cache
    def found(*, is_forced: bool) -> list[Sample]:
        asked = jobs("grammar" if is_forced else "ngram", 0)
        return samples(none_engine.run(asked, concurrency=32))

    return lambda source: found(is_forced=source == "grammar")


@pytest.mark.parametrize("source", SMALLEST_P)
def test_drafts_do_not_change_the_distribution(
    config: AppConfig, without: Callable[[str], list[Sample]], source: str
) -> None:
    # With one source alone: fixed seeds give the same drafts each time.
    with running_engine(config, source) as engine:
        result = engine.run(jobs(source, NUM_SAMPLES), concurrency=32)
    (drafts,) = result.drafts
    assert drafts.num_drafts >= NUM_SAMPLES  # each sample had at least one
    # Otherwise nothing was put to the test: neither taking a draft nor throwing one away.
    assert NUM_SAMPLES / 10 < drafts.num_accepted_tokens < drafts.num_draft_tokens * 0.9
    values = p_values(without(source), samples(result))
    assert min(values.values()) > SMALLEST_P[source], values


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_the_check_notices_drafts_that_are_accepted_without_being_verified(
    config: AppConfig, without: Callable[[str], list[Sample]], share: float
) -> None:
    drawn = without("ngram")
    fair, others = drawn[::2], drawn[1::2]
    assert min(p_values(fair, others).values()) > SMALLEST_P["ngram"]
    first_tokens = [sample[:1] for sample in others]
    copied = [
        first + draft
        for first, draft in zip(first_tokens, _drafts(config, first_tokens), strict=True)
    ]
    rng = random.Random(0)
    biased = [
        copy if rng.random() < share else sample
        for sample, copy in zip(others, copied, strict=True)
    ]
    assert min(p_values(fair, biased).values()) < SMALLEST_P["ngram"]


def _drafts(config: AppConfig, outputs: Sequence[Sample]) -> list[Sample]:
    """What prompt lookup proposes after the prompt and these tokens."""
    contexts = np.array([[*PROMPT, *output] for output in outputs], dtype=np.int32)
    size, length = contexts.shape
    batch = DraftBatch(
        np.arange(size),
        contexts,
        np.full(size, length, dtype=np.int32),
        np.full(size, len(PROMPT), dtype=np.int32),
    )
    section = config.speculation[0]
    source = resolve_name(section.SOURCE)(section, SourceContext(num_slots=size))
    for slot in range(size):
        source.open(slot, RequestControls())
    found = source.propose(batch, np.full(size, NUM_TOKENS - 1, dtype=np.int32))
    pairs = zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)
    drafts = [tuple(tokens[:length]) for tokens, length in pairs]
    assert all(len(draft) == NUM_TOKENS - 1 for draft in drafts)
    return drafts
