"""Jobs and results of an offline engine. Imports no vLLM."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specserve.core.metrics import AcceptanceSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one prompt; names and meanings are vLLM's.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_k: number of tokens kept; 0: all.
        seed: the request's random seed; None: the engine's generator.
        ignore_eos: whether to go on to ``max_tokens`` after the end token.
        stop_token_ids: tokens that end the text, in addition to the end token.
        allowed_token_ids: the only tokens that may be generated; empty: all.
        num_logprobs: number of most likely tokens to report at each position; 0: none.
        score_token_ids: further tokens whose log-probabilities are reported at each position.
        prediction: tokens of the expected answer; empty: none.
        json_schema: JSON schema that constrains the answer; empty: none.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    num_logprobs: int = 0
    score_token_ids: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    json_schema: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, as token ids, with its sampling parameters."""

    prompt_token_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One continuation.

    Attributes:
        text: the generated text, without special tokens.
        token_ids: the generated tokens, with the end token.
        finish_reason: ``stop`` or ``length``.
        seconds: latency of the whole answer, from handing the prompt to the engine.
        token_seconds: latency of each token; equal for all tokens of a step.
        num_draft_tokens: draft tokens verified for this prompt.
        num_accepted_tokens: how many of them were accepted.
        logprobs: for each token, token id to log-probability, of the sampled and the requested
            tokens; empty if none were requested.
        sources: drafted and accepted tokens by source label; empty if not counted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    token_seconds: tuple[float, ...]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    logprobs: tuple[dict[int, float], ...] = ()
    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def first_token_seconds(self) -> float:
        """Time to first token in seconds, from handing the prompt to the engine."""
        return self.token_seconds[0]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prefill time included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


Show = Callable[[int, str, Completion | None], None]
"""Called with a job's index, its new text and, at its end, the whole completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One pass over all jobs.

    Attributes:
        completions: one for each job, in the jobs' order.
        seconds: wall time of the whole pass.
        drafts: acceptance counts of this pass, by source; empty without speculation.
    """

    completions: tuple[Completion, ...]
    seconds: float
    drafts: tuple[AcceptanceSnapshot, ...]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second over the whole pass."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


def by_source(completions: Sequence[Completion]) -> dict[str, dict[str, int]]:
    """Drafted and accepted tokens by source, summed over all answers."""
    total: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for completion in completions:
        for source, counts in completion.sources.items():
            total[source].update(counts)
    return {source: dict(counts) for source, counts in total.items()}
