"""Trains the demo models: a DeepSeek-V3-architecture base and a Llama draft model."""
