"""Chooses each step's sources and drafts, by acceptance and costs. Imports no ray, vllm, torch."""
