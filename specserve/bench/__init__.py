"""The performance run: a file of token ids through a server or an engine, and its figures."""
