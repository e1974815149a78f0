"""The command ``specserve evaluate``: answers with known references, beside Hugging Face's."""
