"""Kills a job that saves in a loop, again and again, and checks after each kill what is on the disk.

Usage: kill_driver.py DIRECTORY --kills N --mode one|async|two-ranks|one-writer|nodes --seed N

Prints one JSON object: the kills, where in a save they hit, and every failure; with any, the exit status is
1. Each job is forked from this process, so that a kill costs milliseconds instead of an import of torch.
It kills on, up to four times as often, until three phases of a save were hit: where the disk is slow, most
of a save is the writing of its files.
"""

import argparse
import json
import logging
import random
import sys
import time
from pathlib import Path

import torch

# Not there by itself where PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).parent))

from kill_job import MODES
from kill_run import Campaign

PHASES = 3
"""Different phases of a save that a campaign must hit before it tells anything."""
MORE = 4
"""How many times the kills asked for a campaign may take for them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mode", choices=sorted(MODES), default="one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=5.0, help="timeout_seconds of the jobs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Every kill leaves something to warn of.
    logging.getLogger("checkpoint_core").setLevel(logging.ERROR)
    began = time.monotonic()
    chance = random.Random(options.seed)
    campaign = Campaign(options.mode, options.directory, options.timeout, chance)
    try:
        while campaign.kills < options.kills or (
            len(campaign.phases) < PHASES and campaign.kills < MORE * options.kills
        ):
            campaign.kill()
        campaign.finish()
    except RuntimeError as error:
        campaign.failures.append(f"kill {campaign.kills}: {error}")
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"mode": options.mode, "seed": options.seed, **campaign.summary(), "seconds": seconds}))
    sys.exit(bool(campaign.failures))


if __name__ == "__main__":
    main()
