"""The draft memory: what was read and written before, by every request on every replica."""
