"""What transformers raises where a checkpoint's files are missing or wrong."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

UNREADABLE = (OSError, ValueError, TypeError, SafetensorError, StrictDataclassError)
"""The last two are only Exceptions: a damaged file of weights, and a field of config.json with a
value of the wrong type."""


def reason_of(error: Exception) -> str:
    """What is wrong with the files, on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
