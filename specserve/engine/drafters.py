"""Finds the drafter of a configured source, with or without a cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import ray
import torch

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
    gpus: Iterator[str],
    config: DraftModelConfig | MtpConfig,
) -> Find:
    """Returns a function that finds a source's drafter; without a cluster, a local drafter.

    Args:
        target: the target model.
        replica: the replica's name in the cluster.
        max_tokens: the target's context length.
        exits: list to which the function that stops a local drafter is added.
        is_warm: set when the engine has taken its share of GPU memory.
        gpus: the free GPUs for local drafters; see :func:`spare_gpus`.
        config: the source's settings.

    Raises:
        ConfigError: the draft model does not exist, or a local drafter finds no GPU of its own.
    """
    if config.model:
        model, revision = folder_or_id(config.model, f"speculation.{config.kind}.model"), ""
    else:
        model, revision = find_checkpoint(target).path, target.revision
    content = ""
    with suppress(ConfigError):  # the drafter reports errors of its model itself
        content = fingerprint(ModelConfig(path=model, revision=revision))
    options = drafter_options(config, model, max_tokens, revision, content)
    find: Find
    if not ray.is_initialized():
        has_own_gpu = config.placement == "actor" and config.num_gpus > 0
        gpu = next(gpus, "") if has_own_gpu else ""
        if has_own_gpu and not gpu and config.num_gpus == 1:
            field = f"speculation.{config.kind}.num_gpus"
            allowed = "a part of the target's GPU, as no other visible one is left"
            raise ConfigError(field, config.num_gpus, allowed)
        find = hosted = HostedDrafter(options, gpu)
        exits.append(hosted.close)
        uses_targets_gpu = config.num_gpus > 0 and not gpu
    elif uses_targets_gpu := config.placement == "beside_rank_0":
        find = DrafterFinder(OwnDrafter(options, replica), config.num_actors)
    else:
        find = DrafterFinder(SharedDrafters(options, replica), config.num_actors)
    if not uses_targets_gpu:
        return find
    # While vLLM measures memory at start, it counts all use of its GPU as its own.
    return lambda: find() if is_warm.is_set() else None


def spare_gpus() -> list[str]:
    """The visible GPUs beside that of an engine in this process, as ``CUDA_VISIBLE_DEVICES``."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return names.split(",")[1:count]
