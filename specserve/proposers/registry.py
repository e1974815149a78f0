"""Kinds of sources by name. A new source is one line here, and is imported only when configured."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from specserve.core.errors import ConfigError
from specserve.core.source_config import SourceConfig
from specserve.proposers.base import Proposer, SourceContext

_SOURCES = {
    "ngram": "specserve.proposers.ngram:NgramProposer",
    "trie": "specserve.proposers.trie:TrieProposer",
    "draft_model": "specserve.proposers.remote:RemoteProposer",
    "mtp": "specserve.proposers.remote:RemoteProposer",
}
"""Kind to ``module:class``; the class makes itself by ``build(config, context)``."""


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


def build_proposer(config: SourceConfig, context: SourceContext) -> Proposer:
    """Makes the proposer that ``config`` describes, ready for its first request."""
    return cast(Proposer, source_class(config.kind).build(config, context))
