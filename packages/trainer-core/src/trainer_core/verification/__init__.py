"""Proof on the devices of the user: see `verify`."""

from .checks import Verification, VerificationCheck, check_verify_settings, verify

__all__ = ["VerificationCheck", "Verification", "check_verify_settings", "verify"]
