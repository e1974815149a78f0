"""A replica's report on speculation: ``GET /v1/speculation`` and its metrics for ``/metrics``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import prometheus_client
from fastapi import APIRouter
from starlette.responses import Response

from specserve.core.config import AppConfig
from specserve.core.metrics import AcceptanceSnapshot, HealthSnapshot, SpeculationSnapshot
from specserve.core.prometheus import PrometheusCollector
from specserve.serve.shared import AS_OF, CACHEABLE, Shared

logger = logging.getLogger(__name__)

_NOT_SHOWN = {"snapshot_url", "model", "resources", "store_resources"}
"""Options of sources that clients do not see: paths, perhaps with credentials, and placement."""

SNAPSHOT_TIMEOUT_S = 2.0


class SpeculationMonitor:
    """Keeps rank 0's last snapshot, and fetches a new one at most once a second.

    A fetch delays the next step of all shards, so it must not happen for every call.
    """

    def __init__(
        self, config: AppConfig, fetch: Callable[[], Awaitable[SpeculationSnapshot | None]]
    ) -> None:
        self._config = config
        self._fetch = fetch
        self._last = SpeculationSnapshot()
        self._answered_at = 0.0
        # `_refresh` has its own, shorter timeout, after which it falls back to the last snapshot.
        self._as_of: Shared[None, float] = Shared(self._refresh, 2 * SNAPSHOT_TIMEOUT_S)
        prometheus_client.REGISTRY.register(
            PrometheusCollector(lambda: self._last, {"model": config.model.name})
        )

    async def refresh(self) -> float:
        """Updates the metrics, and returns the Unix time when the engine was asked for them.

        If rank 0 does not answer in time, the metrics and the time are those of its last answer.
        """
        return await self._as_of.get(None)

    def router(self) -> APIRouter:
        """The route ``GET /v1/speculation``."""
        router = APIRouter()

        @router.get("/v1/speculation", response_model=dict[str, Any])
        async def speculation() -> Response:
            """Sources configured, whether each is up, and acceptance since the replica started."""
            headers = {AS_OF: f"{await self.refresh():.6f}", **CACHEABLE}
            body = msgspec.json.encode(self._answer())
            return Response(body, media_type="application/json", headers=headers)

        return router

    async def _refresh(self, _: None) -> float:
        asked_at = time.time()
        try:
            snapshot = await asyncio.wait_for(self._fetch(), SNAPSHOT_TIMEOUT_S)
        except Exception as error:
            logger.warning("No speculation metrics from rank 0: %r", error)
        else:
            self._last, self._answered_at = snapshot or self._last, asked_at
        return self._answered_at

    def _answer(self) -> dict[str, Any]:
        health = {entry.source: entry for entry in self._last.health}
        in_engine = self._config.drafts_in_engine
        return {
            "object": "speculation",
            "model": self._config.model.name,
            "num_speculative_tokens": self._config.num_speculative_tokens,
            "sources": [
                {
                    **source.model_dump(mode="json", exclude=_NOT_SHOWN),
                    **_health(health.get(source.kind), in_engine),
                }
                for source in self._config.speculation
            ],
            "acceptance": {entry.source: _acceptance(entry) for entry in self._last.acceptance},
        }


def _health(entry: HealthSnapshot | None, in_engine: bool) -> dict[str, Any]:
    if entry is None:
        return {"up": in_engine, "reason": ""}
    return {"up": entry.up, "reason": entry.reason}


def _acceptance(entry: AcceptanceSnapshot) -> dict[str, Any]:
    drafted, accepted = entry.drafted_at_position, entry.accepted_at_position
    return {
        "drafts": entry.num_drafts,
        "draft_tokens": entry.num_draft_tokens,
        "accepted_tokens": entry.num_accepted_tokens,
        "mean_accepted_length": entry.num_accepted_tokens / max(entry.num_drafts, 1),
        "drafted_at_position": drafted,
        "accepted_at_position": accepted,
        "acceptance_rate_at_position": [
            round(a / d, 4) if d else 0.0 for a, d in zip(accepted, drafted, strict=True)
        ],
    }
