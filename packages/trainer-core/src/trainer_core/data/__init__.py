"""Batches, the loaders that give them, and whether data and settings fit together."""
