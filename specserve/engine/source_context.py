"""Builds the context that a replica's draft sources get."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import ray
from vllm.config import VllmConfig

from specserve.core.config import AppConfig
from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import DrafterConfig, TrieConfig
from specserve.drafters.vocabulary import fingerprint
from specserve.engine.checkpoint import find_checkpoint, model_identity
from specserve.engine.cluster_memory import joined_replica
from specserve.engine.drafters import drafter_finder, spare_gpus
from specserve.sources.base import SourceContext
from specserve.trie.memory import SharedMemory, TrieMemory


def source_context(
    config: AppConfig,
    vllm_config: VllmConfig,
    metrics: SpeculationMetrics,
    num_slots: int,
    exits: list[Callable[[], None]],
    is_warm: threading.Event,
) -> SourceContext:
    """Builds the context of rank 0's sources; reads the checkpoint only if a source needs it.

    Functions that stop what the sources start are added to ``exits``. ``is_warm`` is set when the
    engine has taken its share of GPU memory.
    """
    has_drafters = any(isinstance(each, DrafterConfig) for each in config.speculation)
    has_trie = any(isinstance(each, TrieConfig) for each in config.speculation)
    model, target = config.model, vllm_config.model_config
    identity = model_identity(model) if has_drafters or has_trie else ""
    vocab_size: int = target.get_vocab_size()
    is_in_cluster = ray.is_initialized()  # False in an offline engine
    replica = _own_name() if is_in_cluster else ""
    gpus = iter(() if is_in_cluster else spare_gpus())  # Ray assigns those of its actors
    lora = vllm_config.lora_config
    adapters = config.engine.vllm.get("lora_modules") or ()

    def share(trie: TrieConfig, memory: TrieMemory) -> SharedMemory:
        shared = joined_replica(trie, memory, identity, vocab_size)
        exits.insert(0, shared.close)  # first, because others may take long
        return shared

    return SourceContext(
        num_slots=num_slots,
        vocab_size=vocab_size,
        model_identity=identity,
        tenants=tuple(sorted({key.tenant for key in config.http.api_keys})),
        num_adapters=0 if lora is None else lora.max_cpu_loras or lora.max_loras,
        adapters=tuple(each["name"] for each in adapters),
        label_key=bytes.fromhex(vllm_config.additional_config.get("specserve_label_key", "")),
        metrics=metrics,
        share=share if is_in_cluster else None,
        tokenizer=(
            fingerprint(find_checkpoint(model).tokenizer, model.revision) if has_drafters else ""
        ),
        hidden_size=target.get_hidden_size() if has_drafters else 0,
        replica=replica,
        find_drafter=partial(
            drafter_finder, model, replica, target.max_model_len, exits, is_warm, gpus
        ),
        exits=exits,
    )


def _own_name() -> str:
    """A unique name of this process in the cluster: its actor id, or else its job id."""
    context = ray.get_runtime_context()
    return str(context.get_actor_id() or context.get_job_id())
