"""A replica's source of drafts in a separate process that is connected to a cluster.

`DrafterHost` starts such a process and asks it for drafts. `main` runs there.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import DraftModelConfig
from specserve.core.types import DraftBatch, RequestControls
from specserve.drafters.actor import DrafterFinder, SharedDrafters
from specserve.drafters.options import drafter_options
from specserve.sources.base import SourceContext
from specserve.sources.remote import DrafterClient
from tests.draft_batches import propose as drafts_of
from tests.integration.cluster import Cluster, model_path
from tests.integration.host_process import HostProcess, answer, connect

VOCAB_SIZE = json.loads((model_path("demo-draft") / "config.json").read_text())["vocab_size"]
TIMEOUT_S = 2.0


class DrafterHost(HostProcess):
    """A process that asks for drafts of the demo draft model.

    Args:
        cluster: the cluster that it connects to.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, __name__)

    def propose(self, text: list[int]) -> dict[str, Any]:
        """One step of a request: its draft, the time it took, and the source's health."""
        result: dict[str, Any] = self.ask(text)
        return result


def main() -> None:
    """Drafts for texts, each a list of token ids."""
    answers = connect()
    config = DraftModelConfig(
        kind="draft_model",
        model=str(model_path("demo-draft")),
        num_cpus=0.5,
        max_texts=4,
        timeout_s=TIMEOUT_S,
    )
    options = drafter_options(config, config.model, 512)
    metrics = SpeculationMetrics((config.kind,))
    context = SourceContext(
        num_slots=1,
        vocab_size=VOCAB_SIZE,
        metrics=metrics,
        find_drafter=lambda _: DrafterFinder(SharedDrafters(options, "replica"), config.num_actors),
    )
    source = DrafterClient(config, context)
    source.open(0, RequestControls())

    def propose(token_ids: list[int]) -> dict[str, Any]:
        text = np.array([token_ids], np.int32)
        length, limit = np.array([text.shape[1]], np.int32), np.array([3], np.int32)
        batch = DraftBatch(np.array([0]), text, length, length)
        began = time.monotonic()
        drafts = drafts_of(source, batch, limit)
        seconds = time.monotonic() - began
        (health,) = metrics.snapshot().health
        return {
            "tokens": tuple(drafts.tokens[0, : drafts.lengths[0]].tolist()),
            "seconds": seconds,
            "up": health.up,
            "timeouts": health.num_timeouts,
            "errors": health.num_errors,
        }

    answer(answers, propose)


if __name__ == "__main__":
    main()
