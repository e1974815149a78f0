"""Draft sources and what chooses between them: imports no ray, vllm or torch."""
