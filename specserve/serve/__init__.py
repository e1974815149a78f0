"""The Ray Serve deployment."""
