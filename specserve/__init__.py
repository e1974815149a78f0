"""specserve: large language models with lossless speculative decoding, on Ray Serve and vLLM."""

__version__ = "0.1.0"
