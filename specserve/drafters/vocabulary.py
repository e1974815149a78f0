"""A hash of a tokenizer's vocabulary, to check that a drafter has the target's tokens."""

from __future__ import annotations

import hashlib
import json
import logging

from transformers import AutoTokenizer

from specserve.core.errors import reason_of

logger = logging.getLogger(__name__)


def fingerprint(path: str, revision: str = "") -> str:
    """Hash of all tokens with their ids, added tokens included.

    Tokenizers with the same vocabulary have the same fingerprint, however their files are written.

    ``path`` is a Hugging Face checkpoint's folder or, with its ``revision``, its id on the hub.

    Returns:
        64 hexadecimal digits; empty, after a warning, if the tokenizer cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision or None, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises no narrower one for a damaged file
        logger.warning(
            "The vocabulary of %s is unknown and so not checked: %s", path, reason_of(error)
        )
        return ""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
