"""Training on each rank by itself, with weights that are averaged every few steps."""

from .updates import LocalUpdates

__all__ = ["LocalUpdates"]
