"""Loaders of several ranks that agree on the end of the data."""
