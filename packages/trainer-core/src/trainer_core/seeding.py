"""One seed for every generator that training draws from."""

from __future__ import annotations

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Seed python, torch (all devices) and, where it is in use, numpy; -1 leaves all alone."""
    if seed < 0:
        return
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
