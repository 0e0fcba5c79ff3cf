"""Proof on the devices of the user: see `verify`."""

from .checks import Verification, VerificationCheck, verify

__all__ = ["VerificationCheck", "Verification", "verify"]
