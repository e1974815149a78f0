"""Repairs and faster kernels for vLLM on CPU."""
