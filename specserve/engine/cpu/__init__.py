"""Repairs of vLLM on CPU."""
