"""Callbacks that count, show and store what a training run does."""
