"""The command ``specserve bench``: runs a file of token ids and measures its performance."""
