"""Drafters as an application's configuration describes them, in the cluster or without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import ray

from specserve.core.config import ModelConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.drafters.actor import DrafterFinder, OwnDrafter, SharedDrafters
from specserve.drafters.host import HostedDrafter
from specserve.drafters.options import drafter_options
from specserve.engine.checkpoint import find_checkpoint, fingerprint, folder_or_id
from specserve.sources.health_monitor import Find


def drafter_finder(
    target: ModelConfig,
    replica: str,
    max_tokens: int,
    exits: list[Callable[[], None]],
    is_warm: threading.Event,
    config: DraftModelConfig | MtpConfig,
) -> Find:
    """Finds the drafter of a source: one of the cluster's, or without a cluster one of its own.

    Args:
        target: the model that is drafted for.
        replica: its name in the cluster.
        max_tokens: its context length.
        exits: gets what ends a drafter of one's own.
        is_warm: set when the engine has taken its part of the GPU's memory.
        config: the source's.

    Raises:
        ConfigError: there is no such model.
    """
    if config.model:
        model, revision = folder_or_id(config.model, f"speculation.{config.kind}.model"), ""
    else:
        model, revision = find_checkpoint(target).path, target.revision
    content = ""
    with suppress(ConfigError):  # a drafter says itself what is wrong with its model
        content = fingerprint(ModelConfig(path=model, revision=revision))
    options = drafter_options(config, model, max_tokens, revision, content)
    if not ray.is_initialized():
        hosted = HostedDrafter(options)
        exits.append(hosted.close)
        return hosted
    if config.placement == "beside_rank_0":
        find = DrafterFinder(OwnDrafter(options, replica), config.num_actors)
        # vLLM counts all that is taken on its GPU while it measures as its own.
        return lambda: find() if is_warm.is_set() else None
    return DrafterFinder(SharedDrafters(options, replica), config.num_actors)
