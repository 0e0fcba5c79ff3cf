"""Floating-point operations of a model: from its shape, by counting, and as executed."""
