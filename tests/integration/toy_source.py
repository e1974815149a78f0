"""A source of drafts from outside the project. It repeats the last token.

Importing this module registers the source. Import it before the classes of the configuration.
"""

from __future__ import annotations

from typing import Annotated, Literal, Union, get_args

import numpy as np
from pydantic import Field

from specserve.core import source_config
from specserve.core.source_config import Label, SourceSection
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array, RequestControls


class ToyConfig(SourceSection):
    """Options of the source."""

    SOURCE = "tests.integration.toy_source:ToySource"
    LABELS = (Label("echo", "#123456", "#abcdef"),)

    kind: Literal["toy"]
    max_draft_len: int = 3


class ToySource:
    """Drafts the last token again and again."""

    def __init__(self, config: ToyConfig, context: object) -> None:
        """Nothing is kept."""

    def open(self, slot: int, controls: RequestControls) -> None:
        """Nothing is kept."""

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        """Drafts of the last token, as long as the limits allow."""
        last = batch.token_ids[np.arange(len(limits)), batch.num_tokens - 1]
        drafts.tokens[batch.slots] = last[:, None]
        drafts.lengths[batch.slots] = limits
        drafts.confidence[batch.slots] = 0.5

    def close(self, slots: Int64Array) -> None:
        """Nothing is kept."""


_SECTIONS = get_args(get_args(source_config.SourceConfig)[0])
source_config.SourceConfig = Annotated[  # type: ignore[assignment]
    Union[(*_SECTIONS, ToyConfig)], Field(discriminator="kind")
]
