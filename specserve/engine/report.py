"""What speculation did for a request, told in its answer: vLLM's counts, and ours by source.

vLLM counts in the engine core and sends the counts with a request's last output
(``per_request_spec_decode_metrics``, for all requests). Here a request can ask for them, and the
counts by source travel at the end of vLLM's histogram: the message to the replica is decoded into
vLLM's own classes, which have no other room for each of several answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from specserve.core.config import AppConfig

Outcome = tuple[str, int, int]
"""What became of a draft: its label, draft tokens verified and accepted."""


@dataclass
class SourcedMetrics(RequestSpecDecodeMetrics):
    """vLLM's counts of a request, with draft tokens by the label of their source."""

    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As answers tell it."""
        return {**super().to_dict(), "sources": self.sources}


class Reports(NamedTuple):
    """How an engine counts for its requests' answers: for all, or for those that ask."""

    labels: tuple[str, ...]
    num_spec_tokens: int
    of_all: bool

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Those of an engine; without draft sources of ours there are no labels."""
        settings = (vllm_config.additional_config or {}).get("specserve")
        labels: tuple[str, ...] = ()
        if settings:
            labels = AppConfig.model_validate(settings, strict=False).labels
        speculation = vllm_config.speculative_config
        return cls(
            labels,
            speculation.num_speculative_tokens if speculation else 0,
            reports_all(vllm_config),
        )

    def begin(self) -> RequestSpecDecodeMetrics:
        """The counts of a request that begins."""
        return RequestSpecDecodeMetrics.new(self.num_spec_tokens)

    def make_room(self, metrics: RequestSpecDecodeMetrics) -> None:
        """Has vLLM's counts of a request that begins end with ours: two for each label."""
        metrics.histogram.extend([0] * (2 * len(self.labels)))

    def add(self, metrics: RequestSpecDecodeMetrics, outcome: Outcome) -> None:
        """Counts a draft by its source."""
        label, num_drafted, num_accepted = outcome
        place = len(vllms_histogram(metrics)) + 2 * self.labels.index(label)
        metrics.histogram[place] += num_drafted
        metrics.histogram[place + 1] += num_accepted

    def read(self, metrics: RequestSpecDecodeMetrics | None) -> SourcedMetrics:
        """The counts as they arrived; None: nothing was drafted."""
        counts = metrics or self.begin()
        own = vllms_histogram(counts)
        ours = iter(counts.histogram[len(own) :] or [0] * (2 * len(self.labels)))
        sources = {
            label: {"drafted_tokens": next(ours), "accepted_tokens": next(ours)}
            for label in self.labels
        }
        return SourcedMetrics(**{**vars(counts), "histogram": own}, sources=sources)


def vllms_histogram(metrics: RequestSpecDecodeMetrics) -> list[int]:
    """Verified drafts of which 0, 1, ... tokens were accepted, without our counts behind them."""
    histogram: list[int] = metrics.histogram
    return histogram[: metrics.num_spec_tokens + 1]


def reports_all(vllm_config: VllmConfig) -> bool:
    """Whether every request is told of: vLLM's option for that."""
    return bool(vllm_config.observability_config.per_request_spec_decode_metrics != "none")


async def reported(
    outputs: AsyncGenerator[RequestOutput, None], reports: Reports
) -> AsyncGenerator[RequestOutput, None]:
    """The same outputs; an answer's last one has its counts as vLLM's routes tell them."""
    async with aclosing(outputs):  # a client that leaves closes this generator alone
        async for output in outputs:
            for each in output.outputs:
                if each.finish_reason is not None:
                    each.spec_decode_metrics = reports.read(each.spec_decode_metrics)
            yield output
