"""Offline comparison of speculation methods."""
