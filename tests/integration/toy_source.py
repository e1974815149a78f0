"""A source of drafts that is not the project's: the last token, again and again.

To import this module registers it, before anything has read the configuration's classes.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, Union, get_args

from pydantic import Field

from specserve.core import source_config
from specserve.core.source_config import Label, SourceSection
from specserve.core.types import Draft, DraftBatch


class ToyConfig(SourceSection):
    """The last token once more."""

    SOURCE = "tests.integration.toy_source:ToyProposer"
    LABELS = (Label("echo", "#123456", "#abcdef"),)

    kind: Literal["toy"]
    max_draft_len: int = 3
    dynamic: bool = True


class ToyProposer:
    """Guesses that the last token comes again."""

    def __init__(self, max_draft_len: int) -> None:
        self._max_draft_len = max_draft_len

    @classmethod
    def build(cls, config: ToyConfig, context: object) -> Self:
        """Without anything of the replica's."""
        return cls(config.max_draft_len)

    def propose(self, batch: DraftBatch) -> list[Draft]:
        """The last token, as often as it may be."""
        rows = zip(batch.token_ids, batch.num_tokens, batch.max_draft_tokens, strict=False)
        return [
            Draft((int(tokens[length - 1]),) * min(int(most), self._max_draft_len), "echo", 1)
            for tokens, length, most in rows
        ]

    def forget(self, request_ids: list[str]) -> None:
        """Nothing is kept."""


_SECTIONS = get_args(get_args(source_config.SourceConfig)[0])
source_config.SourceConfig = Annotated[  # type: ignore[assignment]
    Union[(*_SECTIONS, ToyConfig)], Field(discriminator="kind")
]
