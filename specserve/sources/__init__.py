"""The draft sources: import no ray, vllm or torch."""
