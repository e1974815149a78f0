"""The sources of a chain, and what decides about their turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specserve.core.source_config import SourceConfig
from specserve.policy.asking import Ask, LocalAsk, RemoteAsk
from specserve.sources.base import RemoteSource, Source, SourceContext
from specserve.sources.guard import GuardedSource
from specserve.sources.registry import build_source


class Member(NamedTuple):
    """A source of the chain.

    Attributes:
        kind: as configured.
        source: what drafts.
        labels: names of its drafts.
        max_draft_len: longest draft in tokens.
        dynamic: whether its drafts are cut to the length that pays, and it is asked where it pays.
        learns: whether it learns from one request for others: it has to see texts to their ends.
        needs: the field of a request's controls without which it drafts nothing; empty: none.
    """

    kind: str
    source: Source
    labels: tuple[str, ...]
    max_draft_len: int
    dynamic: bool = True
    learns: bool = False
    needs: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether it drafts in another process."""
        return isinstance(self.source, RemoteSource)


class Turns(NamedTuple):
    """A source with what decides about its turns; ``place`` is its index in all arrays."""

    place: int
    member: Member
    guard: GuardedSource
    ask: Ask


def ask_policy(member: Member, guard: GuardedSource, num_slots: int) -> Ask:
    """When a source is asked."""
    if not member.dynamic:
        return Ask()
    return RemoteAsk(guard, num_slots) if member.is_remote else LocalAsk()


def build_members(configs: Sequence[SourceConfig], context: SourceContext) -> list[Member]:
    """What a configuration's ``speculation`` describes."""
    return [
        Member(
            config.kind,
            build_source(config, context),
            tuple(label.name for label in config.LABELS),
            config.max_draft_len,
            config.dynamic,
            config.LEARNS,
            config.NEEDS,
        )
        for config in configs
    ]
