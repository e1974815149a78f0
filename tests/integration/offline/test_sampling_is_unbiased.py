"""Sampled output has the same distribution with and without speculation.

Only four tokens are allowed. The prompt and the prediction are long random mixtures of them, so
there is a draft after every token. With a grammar the text is forced, and each sample splits it
into tokens differently. The test counts the first tokens of many samples with and without
speculation. Pearson's chi-square test then compares the two tables.
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
from tests.draft_batches import propose
from tests.integration.offline.engines import running_engine

pytestmark = pytest.mark.timeout(900)

ALPHABET = (300, 301, 302, 303)
NUM_SAMPLES = 2000
NUM_TOKENS = 4
"""Tokens of a sample: the first comes from the prompt alone, the other three have drafts."""
SMALLEST_P = {"ngram": 1e-3, "prediction": 1e-3, "grammar": 1e-5}
"""Smallest allowed p-value by source. With fixed seeds a test always passes or always fails. A
grammar is compiled in a thread, so its first drafts differ from run to run."""

Sample = tuple[int, ...]

PROMPT, PREDICTION = (tuple(random.Random(seed).choices(ALPHABET, k=60)) for seed in (0, 1))
FORCED = json.dumps({"const": "".join(random.Random(2).choices("aeinrst ", k=100))})
"""A schema with one answer, whose text can be split into tokens in many ways."""


def p_values(left: Sequence[Sample], right: Sequence[Sample]) -> dict[str, float]:
    """p-values of the hypothesis that both sides have the same distribution. There is one for each
    position, and one for the drafted positions together."""
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
    # The test needs an expected count of 5 or more in each cell. Rarer cells are merged.
    frequent = sorted(cell for cell, count in both.items() if count >= 10)
    table = [[count[cell] for cell in frequent] for count in counts]
    rest = [sum(count.values()) - sum(row) for count, row in zip(counts, table, strict=True)]
    if sum(rest) >= 10:
        table = [[*row, other] for row, other in zip(table, rest, strict=True)]
    return float(chi2_contingency(np.array(table)).pvalue)


def jobs(source: str, first_seed: int) -> list[Job]:
    """Jobs for which the source has drafts."""
    is_forced = source == "grammar"
    return [
        Job(
            PROMPT,
            Sampling(
                max_tokens=NUM_TOKENS + 1,  # the last token gets no draft
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
    """Samples without speculation, by the source with which they are compared."""

    @cache
    def found(*, is_forced: bool) -> list[Sample]:
        asked = jobs("grammar" if is_forced else "ngram", 0)
        return samples(none_engine.run(asked, concurrency=32))

    return lambda source: found(is_forced=source == "grammar")


@pytest.mark.parametrize("source", SMALLEST_P)
def test_drafts_do_not_change_the_distribution(
    config: AppConfig, without: Callable[[str], list[Sample]], source: str
) -> None:
    # With a single source, fixed seeds give the same drafts each time.
    with running_engine(config, source) as engine:
        result = engine.run(jobs(source, NUM_SAMPLES), concurrency=32)
    (drafts,) = result.drafts
    assert drafts.num_drafts >= NUM_SAMPLES  # each sample had at least one
    # The samples must have both accepted and rejected draft tokens.
    assert NUM_SAMPLES / 10 < drafts.num_accepted_tokens < drafts.num_draft_tokens * 0.9
    values = p_values(without(source), samples(result))
    assert min(values.values()) > SMALLEST_P[source], values


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_the_check_detects_drafts_accepted_without_verification(
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
    """Drafts of prompt lookup after the prompt and these tokens."""
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
    found = propose(source, batch, np.full(size, NUM_TOKENS - 1, dtype=np.int32))
    pairs = zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)
    drafts = [tuple(tokens[:length]) for tokens, length in pairs]
    assert all(len(draft) == NUM_TOKENS - 1 for draft in drafts)
    return drafts
