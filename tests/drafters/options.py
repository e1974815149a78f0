"""Options of a drafter for one short text."""

from __future__ import annotations

from specserve.drafters.options import DrafterOptions


def options_of(model: str, kind: str = "draft_model", max_tokens: int = 64) -> DrafterOptions:
    """Options of a drafter on CPU."""
    return DrafterOptions(
        kind=kind,
        model=model,
        revision="",
        max_texts=1,
        max_tokens=max_tokens,
        dtype="auto",
        num_cpus=1.0,
        num_gpus=0.0,
        resources={},
    )
