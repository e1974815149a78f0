"""Kinds of sources by name. A new source is one line here, and is imported only when configured."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from specserve.core.config import SourceConfig
from specserve.core.errors import ConfigError
from specserve.proposers.base import Proposer

_SOURCES = {
    "ngram": "specserve.proposers.ngram:NgramProposer",
}
"""Kind to ``module:class``; the class is called with the source's own config."""


def known_kinds() -> tuple[str, ...]:
    """All kinds that a configuration may name."""
    return tuple(_SOURCES)


def source_class(kind: str) -> Any:
    """Imports the class behind ``kind``.

    Raises:
        ConfigError: ``kind`` is unknown; the message lists the known ones.
    """
    if kind not in _SOURCES:
        raise ConfigError("kind", kind, ", ".join(known_kinds()))
    module, name = _SOURCES[kind].split(":")
    return getattr(import_module(module), name)


def build_proposer(config: SourceConfig) -> Proposer:
    """Makes the proposer that ``config`` describes, ready for its first request."""
    return cast(Proposer, source_class(config.kind)(config))
