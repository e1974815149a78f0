"""A replica's source of drafts in a process of its own, connected to a cluster.

`DrafterHost` starts such a process and asks it for drafts; `main` is what runs there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from specserve.core.config import DraftModelConfig
from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import DraftBatch
from specserve.drafters.actor import DrafterFinder
from specserve.drafters.options import drafter_options
from specserve.proposers.base import Surroundings
from specserve.proposers.remote import RemoteProposer
from tests.integration.cluster import Cluster, Failed, model_path

VOCAB_SIZE = json.loads((model_path("demo-draft") / "config.json").read_text())["vocab_size"]
TIMEOUT_S = 2.0


class DrafterHost:
    """A process that is connected to a cluster and asks for drafts of the demo draft model.

    Args:
        cluster: which one.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, cluster.address],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=cluster.environment,
            text=True,
        )

    def propose(self, text: list[int]) -> dict[str, Any]:
        """One step of a request: its draft, how long that took, and the source's health."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(text) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise Failed("the process has ended")
        result: dict[str, Any] = json.loads(answer)
        return result

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def main(address: str) -> None:
    """Drafts for each line of standard input, a text's token ids as JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    ray.init(address, log_to_driver=False, namespace="test")
    config = DraftModelConfig(
        kind="draft_model",
        model=str(model_path("demo-draft")),
        num_cpus=0.5,
        max_texts=4,
        timeout_s=TIMEOUT_S,
    )
    options = drafter_options(config, config.model, 512)
    metrics = SpeculationMetrics((config.kind,))
    surroundings = Surroundings(
        vocab_size=VOCAB_SIZE,
        metrics=metrics,
        find_drafter=lambda _: DrafterFinder(options, config.num_actors, "replica"),
    )
    proposer = RemoteProposer.build(config, surroundings)
    for line in sys.stdin:
        text = np.array([json.loads(line)], np.int32)
        length, limit = np.array([text.shape[1]], np.int32), np.array([3], np.int32)
        began = time.monotonic()
        (draft,) = proposer.propose(DraftBatch(["request"], text, length, length, limit))
        seconds = time.monotonic() - began
        (health,) = metrics.snapshot().health
        answer = {
            "tokens": draft.tokens,
            "seconds": seconds,
            "up": health.up,
            "timeouts": health.num_timeouts,
            "errors": health.num_errors,
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
