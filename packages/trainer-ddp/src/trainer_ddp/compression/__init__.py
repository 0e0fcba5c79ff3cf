"""Gradients made smaller before they travel."""

from .base import GradientCompression
from .build import build_compression

__all__ = ["GradientCompression", "build_compression"]
