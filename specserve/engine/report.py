"""Reports draft and acceptance counts in a request's answer: vLLM's counts, and counts by source.

vLLM counts in the engine core and sends the counts with a request's last output
(``per_request_spec_decode_metrics``, for all requests). Here a single request can ask for them. The
counts by source are appended to vLLM's histogram, because the message to the replica is decoded
into vLLM's own classes, which have no other field for them.
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
"""Outcome of a draft: its source's label, verified draft tokens, accepted draft tokens."""


@dataclass
class SourcedMetrics(RequestSpecDecodeMetrics):
    """vLLM's counts of a request, and drafted and accepted tokens by source label."""

    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The counts in the form of the answer's JSON."""
        return {**super().to_dict(), "sources": self.sources}


class Reports(NamedTuple):
    """Counts drafts for answers, of all requests (``of_all``) or of those that ask for it."""

    labels: tuple[str, ...]
    num_spec_tokens: int
    of_all: bool

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Creates an engine's reports; without specserve's draft sources ``labels`` is empty."""
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
        """New counts for a request, all 0."""
        return RequestSpecDecodeMetrics.new(self.num_spec_tokens)

    def make_room(self, metrics: RequestSpecDecodeMetrics) -> None:
        """Appends two counts for each label to the histogram of a new request."""
        metrics.histogram.extend([0] * (2 * len(self.labels)))

    def add(self, metrics: RequestSpecDecodeMetrics, outcome: Outcome) -> None:
        """Adds a draft's outcome to its source's counts."""
        label, num_drafted, num_accepted = outcome
        place = len(vllms_histogram(metrics)) + 2 * self.labels.index(label)
        metrics.histogram[place] += num_drafted
        metrics.histogram[place + 1] += num_accepted

    def read(self, metrics: RequestSpecDecodeMetrics | None) -> SourcedMetrics:
        """Splits received counts into vLLM's and those by source; None reads as all 0."""
        counts = metrics or self.begin()
        own = vllms_histogram(counts)
        ours = iter(counts.histogram[len(own) :] or [0] * (2 * len(self.labels)))
        sources = {
            label: {"drafted_tokens": next(ours), "accepted_tokens": next(ours)}
            for label in self.labels
        }
        return SourcedMetrics(**{**vars(counts), "histogram": own}, sources=sources)


def vllms_histogram(metrics: RequestSpecDecodeMetrics) -> list[int]:
    """Number of verified drafts with 0, 1, ... accepted tokens, without the counts by source."""
    histogram: list[int] = metrics.histogram
    return histogram[: metrics.num_spec_tokens + 1]


def reports_all(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's option asks for counts in every answer."""
    return bool(vllm_config.observability_config.per_request_spec_decode_metrics != "none")


async def reported(
    outputs: AsyncGenerator[RequestOutput, None], reports: Reports
) -> AsyncGenerator[RequestOutput, None]:
    """Passes outputs on, with the counts in the last output of each answer."""
    async with aclosing(outputs):  # a disconnect closes only this generator
        async for output in outputs:
            for each in output.outputs:
                if each.finish_reason is not None:
                    each.spec_decode_metrics = reports.read(each.spec_decode_metrics)
            yield output
