"""A drafter's options, and how it is loaded from them."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import import_module
from secrets import randbits

import numpy as np

from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.drafters.base import Drafter, Row
from specserve.drafters.schedule import FEED_TOKENS
from specserve.drafters.server import MAX_FAILURES, DrafterServer
from specserve.wire.messages import PROTOCOL

logger = logging.getLogger(__name__)

NAME_PREFIX = "specserve-drafter-"

FAILED_BACKOFF_S = 30.0
"""Seconds before a drafter that could not load its model is started again."""

MAX_WARM_UP_S = 300
"""Limit of the first model call in seconds. A process that hangs longer ends; its parent or Ray
restarts it. Time in which the process is suspended counts too."""

_DRAFTERS = {
    "draft_model": "specserve.drafters.causal:CausalDrafter",
    "mtp": "specserve.drafters.mtp:MtpDrafter",
}
"""Kind to ``module:class``; they import torch, so only a drafter's process imports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """Options of a drafter. Replicas with equal options share it.

    Options not described here are as in the source's configuration.

    Attributes:
        model: folder or hub id of the model.
        revision: branch, tag or commit on the hub; empty: the default one.
        max_tokens: longest text in tokens, the target's context length.
        num_gpus: above 0, it computes on a GPU; below 1, it is also limited to this share of the
            GPU's memory.
        content: identifies what the model's folder holds; empty: unknown.
    """

    kind: str
    model: str
    revision: str
    max_texts: int
    max_tokens: int
    dtype: str
    num_cpus: float
    num_gpus: float
    resources: dict[str, float]
    content: str = ""

    @property
    def num_threads(self) -> int:
        """Threads that a drafter on CPU computes with."""
        return max(1, int(self.num_cpus))

    def name(self, index: int) -> str:
        """Name of actor ``index``; other options or another protocol give another name."""
        contents = json.dumps([PROTOCOL, asdict(self)], sort_keys=True).encode()
        digest = blake2b(contents, digest_size=6).hexdigest()
        return f"{NAME_PREFIX}{self.kind}-{digest}-{index}"


def drafter_options(
    config: DraftModelConfig | MtpConfig,
    model: str,
    max_tokens: int,
    revision: str = "",
    content: str = "",
) -> DrafterOptions:
    """Options of the drafter that a source configures; ``model`` must be valid on all nodes."""
    shared = {"kind", "max_texts", "dtype", "num_cpus", "num_gpus", "resources"}
    return DrafterOptions(
        model=model,
        revision=revision,
        max_tokens=max_tokens,
        content=content,
        **config.model_dump(include=shared),
    )


def serve(options: DrafterOptions, bind: str) -> DrafterServer:
    """Loads a drafter and serves it; ends this process after repeated failures of the model.

    Raises:
        ValueError: the model cannot draft.
    """
    return DrafterServer(load(options), bind, on_broken=_end)


def _end() -> None:
    logger.error("The model has failed %d turns in a row: this drafter ends", MAX_FAILURES)
    os._exit(1)


def load(options: DrafterOptions) -> Drafter:
    """Loads a drafter's model, and runs it once.

    Raises:
        ValueError: the model cannot draft.
    """
    torch = import_module("torch")
    module, name = _DRAFTERS[options.kind].split(":")
    on_gpu = options.num_gpus > 0
    if 0 < options.num_gpus < 1:
        # Only the drafter runs out of memory, not the process that has the rest of the GPU.
        torch.cuda.set_per_process_memory_fraction(options.num_gpus)
    if not on_gpu:
        torch.set_num_threads(options.num_threads)
    default = "bfloat16" if on_gpu else "float32"
    drafter: Drafter = getattr(import_module(module), name).load(
        options.model,
        revision=options.revision,
        max_texts=options.max_texts,
        max_tokens=options.max_tokens,
        dtype=getattr(torch, default if options.dtype == "auto" else options.dtype),
        device="cuda" if on_gpu else "cpu",
    )
    # To file descriptor 2: sys.stderr need not be a file.
    faulthandler.dump_traceback_later(MAX_WARM_UP_S, exit=True, file=2)
    try:
        _warm_up(drafter)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return drafter


def _warm_up(drafter: Drafter) -> None:
    """Runs the first model call, which takes longer and shows whether the memory suffices."""
    width = drafter.card.hidden_size
    num_tokens = max(1, min(FEED_TOKENS, drafter.card.max_tokens - 1))
    row = Row(
        key=(b"", 0),
        salt=randbits(64),
        start=0,
        tokens=np.zeros(num_tokens, np.int32),
        states=np.zeros((num_tokens - 1, width), np.uint16) if width else None,
        max_draft_tokens=1,
    )
    drafter.draft([row])
    drafter.forget([row.key])
