"""What transformers raises where a checkpoint's files are missing or wrong."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

UNREADABLE = (OSError, ValueError, TypeError, StrictDataclassError)
"""The last one is a field of config.json with a value of the wrong type, and only an Exception."""


def reason_of(error: Exception) -> str:
    """What is wrong with the files, on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
