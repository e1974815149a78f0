"""Whether speculation has changed the greedy output.

Two outputs may part where the model itself does not decide: in bf16 the two most likely tokens
are often within rounding of each other, and a batch of another shape rounds otherwise. So the
first difference is put to the engine without speculation: given the common beginning as a prompt,
how far apart are the two tokens' log-probabilities? And the token written under speculation has to
be as near to the engine's own choice. What follows a difference is another text and is not
compared.

A prompt is computed otherwise than a decoding step is. Where the weights leave much to rounding, as
an untrained router of experts does, the engine without speculation can contradict itself by more
than the tolerance; the check then fails although no draft is to blame.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specserve.engine.generation import Completion, Job, RunResult, Sampling

BF16_TOLERANCE = 0.1
"""Largest gap of a near tie in bf16 and float16, in nats. Most greedy outputs part within 0.07. A
model with routed experts was seen to part by 0.375, with vLLM's own methods as with ours: what
fails here is to be run in float32."""


def default_tolerance(dtype: str) -> float:
    """Largest gap of a near tie in a number format, in nats; in float32 there is none."""
    return 0.0 if dtype == "float32" else BF16_TOLERANCE


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt's output first parts from the reference.

    Attributes:
        prompt: index of the prompt.
        position: index of the output token.
        expected: the reference's token; None where its output had ended.
        got: the compared output's token; None where that had ended.
        gap: difference of the two tokens' log-probabilities given the common beginning, or of
            ``got`` and the likeliest token if that is more; in nats; infinite where one output
            had ended.
    """

    prompt: int
    position: int
    expected: int | None
    got: int | None
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome for one method.

    Attributes:
        num_identical: outputs equal token by token.
        near_ties: differences with a gap of at most ``tolerance``.
        failures: all others.
        tolerance: in nats.
    """

    num_identical: int
    near_ties: tuple[Difference, ...]
    failures: tuple[Difference, ...]
    tolerance: float

    @property
    def num_compared(self) -> int:
        """All outputs."""
        return self.num_identical + len(self.near_ties) + len(self.failures)

    @property
    def is_lossless(self) -> bool:
        """No difference beyond the tolerance."""
        return not self.failures


def first_difference(
    expected: Sequence[int], got: Sequence[int]
) -> tuple[int, int | None, int | None] | None:
    """Index and both tokens where two outputs part, None for one that had ended.

    None alone: they are equal.
    """
    for index, (left, right) in enumerate(itertools.zip_longest(expected, got)):
        if left != right:
            return index, left, right
    return None


def judge(
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Completion],
    outputs: Sequence[Completion],
    *,
    score: Callable[[list[Job]], RunResult],
    tolerance: float,
) -> Verdict:
    """Compares outputs with those of a reference method.

    Args:
        prompts: token ids of n prompts.
        reference: n greedy completions of the reference method.
        outputs: n completions of the method.
        score: runs jobs on the engine without speculation; called only if there are differences.
        tolerance: largest gap of a near tie, in nats; 0: there are none, the texts must be equal.
    """
    parted = [
        (index, difference)
        for index, (left, right) in enumerate(zip(reference, outputs, strict=True))
        if (difference := first_difference(left.token_ids, right.token_ids)) is not None
    ]
    jobs = {
        index: Job(
            (*prompts[index], *reference[index].token_ids[:position]),
            Sampling(max_tokens=1, score_token_ids=(expected, got)),
        )
        for index, (position, expected, got) in parted
        if expected is not None and got is not None
    }
    scored = score([*jobs.values()]).completions if jobs else ()
    gaps = {
        index: _gap(job, completion)
        for (index, job), completion in zip(jobs.items(), scored, strict=True)
    }
    near_ties: list[Difference] = []
    failures: list[Difference] = []
    for index, difference in parted:
        gap = gaps.get(index, math.inf)
        is_tie = tolerance > 0 and gap <= tolerance
        (near_ties if is_tie else failures).append(Difference(index, *difference, gap))
    return Verdict(
        num_identical=len(outputs) - len(parted),
        near_ties=tuple(near_ties),
        failures=tuple(failures),
        tolerance=tolerance,
    )


def _gap(job: Job, completion: Completion) -> float:
    """Of the job's tokens, or of the second and the engine's choice if that is more; in nats."""
    logprobs = completion.logprobs[0]  # of both, and of the engine's own choice
    expected, got = (logprobs[token] for token in job.sampling.score_token_ids)
    return max(abs(expected - got), max(logprobs.values()) - got)
