"""The cluster's drafters, as a replica's configuration describes them."""

from __future__ import annotations

import ray

from specserve.core.config import DraftModelConfig, ModelConfig, MtpConfig
from specserve.drafters.actor import DrafterFinder, drafter_options
from specserve.engine.checkpoint import find_checkpoint, folder_or_id


def drafter_finder(
    target: ModelConfig, max_tokens: int, config: DraftModelConfig | MtpConfig
) -> DrafterFinder:
    """Finds the drafter of a source; for a process that is an actor of Ray.

    Args:
        target: the model that is drafted for.
        max_tokens: its context length.
        config: the source's.

    Raises:
        ConfigError: there is no such model.
    """
    if config.model:
        model = folder_or_id(config.model, f"speculation.{config.kind}.model")
    else:
        model = find_checkpoint(target).path
    replica = ray.get_runtime_context().get_actor_id() or ""
    options = drafter_options(config, model, max_tokens)
    return DrafterFinder(options, config.num_actors, replica)
