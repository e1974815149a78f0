"""Checks whether speculation has changed the greedy output.

Rounding depends on the batch shape. In bf16 it can decide between two tokens of nearly equal
probability: a near tie. Two correct outputs may differ from there on. So the engine without
speculation scores each output's first difference, with the common prefix as its prompt. It is a
near tie if two gaps of log-probabilities are within a tolerance: between the two tokens, and
between the speculative token and the engine's own choice. The second gap says nothing where a
schema may forbid the engine's choice. Later tokens are not compared.

A prefill step rounds differently from a decode step. For some weights, such as an untrained expert
router, the engine without speculation can differ from itself by more than the tolerance. The check
then fails although the drafts are correct.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from specserve.engine.generation import Completion, Job, RunResult, Sampling

BF16_TOLERANCE = 0.1
"""Largest gap of a near tie in bf16 and float16, in nats. Most differences have a gap below 0.07.
A model with routed experts had gaps up to 0.375, with vLLM's own methods and with ours. Repeat a
failed check in float32."""


def default_tolerance(dtype: str) -> float:
    """Largest gap of a near tie for a dtype, in nats; 0 for float32, where texts must be equal."""
    return 0.0 if dtype == "float32" else BF16_TOLERANCE


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where an output differs from the reference.

    Attributes:
        prompt: index of the prompt.
        position: index of the output token.
        expected: the reference's token; None if the reference output had ended.
        got: the compared output's token; None if that output had ended.
        gap: difference of log-probabilities after the common prefix, in nats: of the two tokens, or
            without a schema of ``got`` and the most likely token if that is larger. Infinite if one
            output had ended.
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
        num_identical: number of outputs that are equal token by token.
        near_ties: differences with a gap of at most ``tolerance``; none if that is 0.
        failures: all other differences.
        tolerance: in nats.
    """

    num_identical: int
    near_ties: tuple[Difference, ...]
    failures: tuple[Difference, ...]
    tolerance: float

    @property
    def num_compared(self) -> int:
        """Number of compared outputs."""
        return self.num_identical + len(self.near_ties) + len(self.failures)

    @property
    def is_lossless(self) -> bool:
        """True if no difference exceeds the tolerance."""
        return not self.failures


def first_difference(
    expected: Sequence[int], got: Sequence[int]
) -> tuple[int, int | None, int | None] | None:
    """Where two outputs first differ: (index, expected token, got token).

    A token is None if its output had ended. The result is None if the outputs are equal.
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
    constrained: Collection[int] = (),
) -> Verdict:
    """Compares outputs with those of a reference method.

    Args:
        prompts: token ids of n prompts.
        reference: n greedy completions of the reference method.
        outputs: n completions of the method.
        score: runs jobs on the engine without speculation; called only if there are differences.
        tolerance: largest gap of a near tie, in nats; 0: the texts must be equal.
        constrained: indices of the prompts whose answers a schema constrains.
    """
    differing = [
        (index, difference)
        for index, (left, right) in enumerate(zip(reference, outputs, strict=True))
        if (difference := first_difference(left.token_ids, right.token_ids)) is not None
    ]
    jobs = {
        index: Job(
            (*prompts[index], *reference[index].token_ids[:position]),
            Sampling(max_tokens=1, score_token_ids=(expected, got)),
        )
        for index, (position, expected, got) in differing
        if expected is not None and got is not None
    }
    scored = score([*jobs.values()]).completions if jobs else ()
    gaps = {
        index: _gap(job, completion, is_constrained=index in constrained)
        for (index, job), completion in zip(jobs.items(), scored, strict=True)
    }
    near_ties: list[Difference] = []
    failures: list[Difference] = []
    for index, difference in differing:
        gap = gaps.get(index, math.inf)
        is_tie = tolerance > 0 and gap <= tolerance
        (near_ties if is_tie else failures).append(Difference(index, *difference, gap))
    return Verdict(
        num_identical=len(outputs) - len(differing),
        near_ties=tuple(near_ties),
        failures=tuple(failures),
        tolerance=tolerance,
    )


def _gap(job: Job, completion: Completion, *, is_constrained: bool) -> float:
    """The gap that :class:`Difference` defines, in nats."""
    logprobs = completion.logprobs[0]  # of both tokens and of the engine's own choice
    expected, got = (logprobs[token] for token in job.sampling.score_token_ids)
    gap = abs(expected - got)
    return gap if is_constrained else max(gap, max(logprobs.values()) - got)
