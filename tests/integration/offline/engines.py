"""An engine in a process of its own, for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specserve.compare.engine_process import EngineProcess
from specserve.core.config import AppConfig
from specserve.engine.methods import parse_method


@contextmanager
def running_engine(config: AppConfig, method: str) -> Iterator[EngineProcess]:
    """A ready engine for the length of a block."""
    with EngineProcess(config, parse_method(method, config)) as engine:
        engine.wait_ready()
        yield engine
