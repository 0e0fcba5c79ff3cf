"""Proof on the devices of the user: see `verify`."""

from .checks import Check, Verification, verify

__all__ = ["Check", "Verification", "verify"]
