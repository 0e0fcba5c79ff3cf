"""One seed for every generator that training draws from."""

from __future__ import annotations

import random
import sys

import torch

from dist_env import ParallelLayout

from .arguments import TrainingArguments


def seed_rank(args: TrainingArguments, layout: ParallelLayout, rank: int) -> None:
    """Give each rank generators of its own, once all ranks have built the same model, if asked for.

    Ranks that differ in the dimension `tensor` only have the same: what they do not divide, such as a mask of
    dropout on hidden states, each of them computes, and it has to be equal.
    """
    if args.seed_per_rank:
        rank -= layout.coordinates(rank)["tensor"]  # the innermost dimension
        seed_everything((args.seed + rank) % 2**64)


def seed_everything(seed: int) -> None:
    """Seed python, torch (all devices) and, where it is in use, numpy; -1 leaves all alone."""
    if seed < 0:
        return
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
