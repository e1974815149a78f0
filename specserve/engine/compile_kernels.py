"""Compiles all kernels and caches them on disk, so that replicas start without compiling:

    python -m specserve.engine.compile_kernels

``make setup`` and the image run it. A kernel that is not in the cache is compiled when needed.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import (
    DraftModelConfig,
    NgramConfig,
    PredictionConfig,
    TrieConfig,
)
from specserve.drafters.mtp_kernels import compile_draft
from specserve.engine.cpu.drawing import Verifier
from specserve.policy.chain import build_chain
from specserve.sources.base import SourceContext
from specserve.sources.prediction import num_predicted
from specserve.trie.memory import SharedMemory


def compile_kernels() -> None:
    """Builds a chain of all sources that have kernels, and of a remote one for its ask policy's.
    Then counts a prediction's correct tokens, as replicas do. The last kernels are those of the MTP
    drafter and of the verification on CPU.
    """
    sources = (
        NgramConfig(kind="ngram"),
        PredictionConfig(kind="prediction"),
        TrieConfig(kind="trie", max_bytes=1 << 20),
        DraftModelConfig(kind="draft_model", model="none"),
    )
    nobody = cast(SharedMemory, object())  # nothing is published
    context = SourceContext(num_slots=1, share=lambda *_: nobody)
    build_chain(sources, SpeculationMetrics(), context)
    for end in context.exits:
        end()
    num_predicted(np.ones(1, np.int32), [1])
    compile_draft()
    Verifier()


if __name__ == "__main__":
    compile_kernels()
