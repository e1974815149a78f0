"""The only importer of vLLM."""
