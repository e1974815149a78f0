"""The command ``specserve evaluate``: scores answers against references and Hugging Face's."""
