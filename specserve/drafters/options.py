"""What a drafter is made with, and the making."""

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
from specserve.drafters.server import MOST_FAILURES, DrafterServer
from specserve.wire.messages import PROTOCOL

logger = logging.getLogger(__name__)

NAME_PREFIX = "specserve-drafter-"

FAILED_REST_S = 30.0
"""Before a drafter is started again that could not load its model."""

LONGEST_WARM_UP_S = 300
"""A first call that takes longer hangs, and ends the process; whoever started it starts another.
The time in which the process is stopped counts, too."""

_DRAFTERS = {
    "draft_model": "specserve.drafters.causal:CausalDrafter",
    "mtp": "specserve.drafters.mtp:MtpDrafter",
}
"""Kind to ``module:class``; they import torch, and so only the actors import them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """What a drafter is made with. Replicas with equal ones share it.

    What is not listed is as in its source's section.

    Attributes:
        model: folder or hub id of what it loads.
        revision: on the hub: branch, tag or commit; empty: the default one.
        max_tokens: longest text, the target's context length.
        num_gpus: it computes on a GPU where that is not 0, and keeps to its part of the memory
            where that is below 1.
        content: tells what the model's folder holds; empty: unknown.
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
        """Of a drafter on CPU."""
        return max(1, int(self.num_cpus))

    def name(self, index: int) -> str:
        """Name in the cluster of the actor of this number, and of no other model or protocol."""
        made_with = json.dumps([PROTOCOL, asdict(self)], sort_keys=True).encode()
        digest = blake2b(made_with, digest_size=6).hexdigest()
        return f"{NAME_PREFIX}{self.kind}-{digest}-{index}"


def drafter_options(
    config: DraftModelConfig | MtpConfig,
    model: str,
    max_tokens: int,
    revision: str = "",
    content: str = "",
) -> DrafterOptions:
    """The drafter that a source's configuration describes; ``model`` as all nodes find it."""
    shared = {"kind", "max_texts", "dtype", "num_cpus", "num_gpus", "resources"}
    return DrafterOptions(
        model=model,
        revision=revision,
        max_tokens=max_tokens,
        content=content,
        **config.model_dump(include=shared),
    )


def serve(options: DrafterOptions, bind: str) -> DrafterServer:
    """Loads a drafter and serves it; ends this process when the model fails again and again.

    Raises:
        ValueError: it is no model that can draft.
    """
    return DrafterServer(load(options), bind, on_broken=_end)


def _end() -> None:
    logger.error("The model has failed %d turns in a row: this drafter ends", MOST_FAILURES)
    os._exit(1)


def load(options: DrafterOptions) -> Drafter:
    """Loads a drafter's model, and has it compute once.

    Raises:
        ValueError: it is no model that can draft.
    """
    torch = import_module("torch")
    module, name = _DRAFTERS[options.kind].split(":")
    on_gpu = options.num_gpus > 0
    if 0 < options.num_gpus < 1:
        # Whoever has the rest of the GPU finds it free: out of memory is the drafter alone.
        torch.cuda.set_per_process_memory_fraction(options.num_gpus)
    if not on_gpu:
        torch.set_num_threads(options.num_threads)
    usual = "bfloat16" if on_gpu else "float32"
    drafter: Drafter = getattr(import_module(module), name).load(
        options.model,
        revision=options.revision,
        max_texts=options.max_texts,
        max_tokens=options.max_tokens,
        dtype=getattr(torch, usual if options.dtype == "auto" else options.dtype),
        device="cuda" if on_gpu else "cpu",
    )
    faulthandler.dump_traceback_later(LONGEST_WARM_UP_S, exit=True)
    try:
        _warm_up(drafter)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return drafter


def _warm_up(drafter: Drafter) -> None:
    """The first call of all takes longer, and shows whether there is memory for one."""
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
