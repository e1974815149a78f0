"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.core.errors import ConfigError

if TYPE_CHECKING:
    from specserve.core.config import AppConfig

AUTO, OFF = "auto", "off"
"""``--speculation`` is ``auto`` (all sources), ``off`` (no drafts) or a kind of source."""


def number_from(lowest: int) -> Callable[[str], int]:
    """An argparse type: parses a whole number that is at least ``lowest``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {lowest} on")
        return int(text)

    return parse


def at_least_zero(name: str, value: float) -> float:
    """Returns ``value`` if it is valid.

    Raises:
        ConfigError: the value of the option ``name`` is below 0 or not finite.
    """
    if not 0 <= value < float("inf"):
        raise ConfigError(name, value, "a number from 0 on")
    return value


def in_existing_folder(name: str, path: Path | None) -> None:
    """Checks that a file can be written at ``path``, before a command starts its long work.

    Raises:
        ConfigError: the parent folder does not exist or is not writable, or ``path`` is a folder.
    """
    if path and (not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir()):
        raise ConfigError(name, str(path), "a file in an existing, writable folder")


def only_application(path: Path) -> AppConfig:
    """The configuration of a Serve file's only application.

    Raises:
        ConfigError: the file is wrong, has several applications, or its model is missing; or vLLM
            has another version than the tested one.
    """
    # Imported here so that `--help` stays fast.
    from specserve.engine.checkpoint import find_checkpoint
    from specserve.engine.vllm_version import check_engine, is_cpu_build
    from specserve.engine.weights import check_weights
    from specserve.serve.config_file import read

    applications = read(path).applications
    if len(applications) > 1:
        raise ConfigError("--config", str(path), "a file with one application")
    config = applications[0].config
    check_engine(config)
    checkpoint = find_checkpoint(config.model, f"{applications[0].field}.model")
    check_weights(config, checkpoint.path, on_cpu=is_cpu_build())
    return config
