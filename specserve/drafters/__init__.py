"""Models that draft in actors of their own: the draft model and the MTP module."""
