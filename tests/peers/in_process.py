"""Switches for an engine in the same process, to change it between turns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from specserve.compare.engine_process import engine_environment
from specserve.core.config import AppConfig

if TYPE_CHECKING:  # importing it loads libraries
    from specserve.policy.chain import Chain


def relaunched(module: str, config: AppConfig, argv: Sequence[str] | None) -> int | None:
    """Runs a module in a process with an engine's environment. None: this process already has it.

    Libraries must be loaded with the right environment, so a new process is needed.
    """
    environment = engine_environment(config)
    if environment == os.environ:
        return None
    given = sys.argv[1:] if argv is None else argv
    return subprocess.call([sys.executable, "-m", module, *given], env=environment)


def worker_of(engine: Any) -> Any:
    """The worker of an :class:`~specserve.engine.offline.OfflineEngine` of one shard."""
    return _core_of(engine).model_executor.driver_worker.worker


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an :class:`~specserve.engine.offline.OfflineEngine`."""
    return _core_of(engine).scheduler


def _core_of(engine: Any) -> Any:
    return engine._engine.engine_core.engine_core


class SpeculationSwitch:
    """Switches a worker between steps with and without speculation.

    Args:
        worker: a worker with a proposer hook.
    """

    def __init__(self, worker: Any) -> None:
        from specserve.engine.scheduler import DraftScheduler
        from specserve.engine.worker import SpeculationMixin

        self._use, self._draft_first = DraftScheduler.draft_first_with, DraftScheduler._draft_first
        self._worker, self._vllms = worker, super(SpeculationMixin, worker)
        self._config = worker.model_runner.speculative_config

    def __call__(self, *, is_on: bool) -> None:
        """Switches from the next step on. No request may be running."""
        self._use(self._draft_first if is_on else None)
        self._worker.model_runner.speculative_config = self._config if is_on else None
        for name in ("execute_model", "sample_tokens"):
            if is_on:
                self._worker.__dict__.pop(name, None)
            else:
                setattr(self._worker, name, getattr(self._vllms, name))


class SourcesSwitch:
    """Restricts a chain to some of its sources.

    Args:
        chain: a replica's chain with all sources.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain, self._all = chain, list(chain._sources)

    def __call__(self, kinds: Collection[str]) -> None:
        """Switches from the next step on. No request may be open."""
        self._chain._sources = [each for each in self._all if each.member.kind in kinds]
        self._chain._find_usable()
