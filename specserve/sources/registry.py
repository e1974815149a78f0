"""From a source's configuration to what drafts."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from specserve.core.source_config import SourceConfig, SourceSection
from specserve.sources.base import Source, SourceContext


def source_class(section: type[SourceSection]) -> Any:
    """Imports what drafts for a kind of source."""
    module, name = section.SOURCE.split(":")
    return getattr(import_module(module), name)


def build_source(config: SourceConfig, context: SourceContext) -> Source:
    """Makes the source that ``config`` describes, ready for its first request."""
    return cast(Source, source_class(type(config)).build(config, context))
