"""Kills a job that saves to two tiers without end, again and again, and checks both tiers after each kill.

Usage: tier_kills.py DIRECTORY ENVIRONMENT ADDRESS MODE KILLS SEED, the mode being one, async, two-ranks or
parts, where each of two ranks has a disk of its own.

Prints one JSON object: where the kills hit, and every failure. Jobs are those of `kill_job.py`. Every so many
kills a local directory is removed, as on a host that was replaced.
"""

import functools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Not there by itself where PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "workers"))

import kill_job
import torch
from kill_audit import Outcome
from kill_job import MODES, REFUSED_EXIT, SAVE_TOTAL_LIMIT, Life, values_in
from kill_run import GRACE_SECONDS, ONE_ONLY_EVERY, START_SECONDS, Running
from store_kills import TIMEOUT_SECONDS, in_child

from checkpoint_core import CheckpointConfig, CheckpointError, find_latest_checkpoint
from checkpoint_core.directory import checkpoint_directories, find_leftovers
from checkpoint_core.loading import StoredState, decode, read_all
from checkpoint_core.manifest import MANIFEST_NAME, read_manifest, verify_checkpoint
from checkpoint_core.store_path import locate

WIPE_EVERY = 7
TERM_EVERY = 5
TIDY_EVERY = 4


def values_of(where: Any) -> dict[int, list[float]]:
    """All values that each committed checkpoint says, every byte of it verified."""
    found: dict[int, list[float]] = {}
    for step, path in checkpoint_directories(where):
        if not (path / MANIFEST_NAME).is_file():
            continue
        manifest = verify_checkpoint(path, checksums=True)
        values = values_in(dict(manifest.metrics or {}))
        for record in manifest.components:
            for part in record.parts:
                stored = StoredState([path / name for name in part.files], record.format)
                values |= values_in(decode(*read_all(stored, threads=1)))
                stored.close()
        missing = [name for name in manifest.files if not (path / name).is_file()]
        found[step] = [*sorted(values), *(-1.0 for _ in missing)]
    return found


def put_together(disks: list[Path], directory: Path) -> Path:
    """The checkpoints of which all disks together have all files, in one directory.

    A save is committed when one node has published it; another may have been killed before its own turn.
    """
    shutil.rmtree(directory, ignore_errors=True)
    found: dict[tuple[int, str], list[Path]] = {}
    published = set()
    for disk in disks:
        for path in [*disk.glob("checkpoint-*"), *disk.glob(".tmp-checkpoint-*")]:
            try:
                manifest = verify_checkpoint(path, checksums=False, one_node=True)
            except (CheckpointError, FileNotFoundError):
                continue
            found.setdefault((manifest.step, manifest.save_id), []).append(path)
            if path.name[0] != ".":
                published.add((manifest.step, manifest.save_id))
    for (step, save), paths in found.items():
        files = {
            name: path / name
            for path in paths
            for name in read_manifest(path).files
            if (path / name).is_file()
        }
        if (step, save) in published and set(files) == set(read_manifest(paths[0]).files):
            target = directory / f"checkpoint-{step}"
            target.mkdir(parents=True)
            for name, file in {**files, MANIFEST_NAME: paths[0] / MANIFEST_NAME}.items():
                os.link(file, target / name)
    return directory


def look(disks: list[str], address: str, pids: list[int]) -> dict[str, Any]:
    """What lies in both tiers."""
    local, remote = Path(disks[0]), locate(address)
    if len(disks) > 1:
        local = put_together(list(map(Path, disks)), local.parent / "together")
    referenced = set()
    for _, path in checkpoint_directories(remote):
        if (path / MANIFEST_NAME).is_file():
            manifest = verify_checkpoint(path, checksums=False)
            referenced |= {str(path / name) for name in [*manifest.files, MANIFEST_NAME]}
    leftovers = find_leftovers(remote)
    marked = {leftover.path.name.rpartition("-")[2] for leftover in leftovers}
    objects = [path for path in remote.rglob("*") if str(path) not in referenced and path.name[0] != "."]
    newest = find_latest_checkpoint(local, remote_dir=address, verify_checksums=True)
    return {
        "newest": None if newest is None else str(newest),
        "local": values_of(local),
        "remote": values_of(remote),
        "uploading": [leftover.kind for leftover in leftovers if leftover.pid in pids],
        "markers": len(leftovers),
        "unmarked": [str(path) for path in objects if path.parent.name not in marked],
        "torn": len(objects),
    }


@dataclass
class Campaign:
    """All kills in one place."""

    mode: str
    directory: Path
    address: str
    chance: random.Random
    kills: int = 0
    wipes: int = 0
    saves: int = 0
    cleaned: int = 0
    failures: list[str] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    begun: dict[int, set[int]] = field(default_factory=dict)
    """Every value that any life has begun to save, by step."""
    tiers: dict[str, dict[int, int]] = field(default_factory=lambda: {"local": {}, "remote": {}})
    """What each tier held when it was last looked at."""
    markers: int = 0
    next_value: int = 1

    @property
    def disks(self) -> list[Path]:
        """Where the nodes save."""
        return Life(MODES[self.mode], self.directory, False, 0, TIMEOUT_SECONDS).output_dirs()

    @property
    def run(self) -> Path:
        """Where the checkpoints of all disks are to be found."""
        return self.disks[0] if len(self.disks) == 1 else self.directory / "together"

    def life(self, *, endless: bool = True) -> Running:
        mode = MODES[self.mode]
        asynchronous = self.mode == "async" or (mode.ranks > 1 and self.chance.random() < 0.5)
        return Running(Life(mode, self.directory, asynchronous, self.next_value, TIMEOUT_SECONDS, endless))

    def kill(self) -> None:
        running = self.life()
        try:
            running.wait_for("loaded", START_SECONDS)
            if self.chance.random() < 0.9:
                running.wait_for("done", START_SECONDS)
            # The store keeps what a life had no time to rotate away; some live long enough to tidy up.
            longest = 3.0 if self.kills % TIDY_EVERY == 0 else 0.5
            until = time.monotonic() + self.chance.uniform(0.0, longest)
            while time.monotonic() < until:
                running.read(until - time.monotonic())
            ranks = list(range(running.life.mode.ranks))
            one_only = len(ranks) > 1 and self.kills % ONE_ONLY_EVERY == ONE_ONLY_EVERY - 1
            if one_only:
                killed = self.chance.choice(ranks)
                running.kill([killed])
                self.await_survivor(running, 1 - killed)
            else:
                if self.kills % TERM_EVERY == 0:
                    self.terminate(running)
                else:
                    running.kill(ranks)
                if not running.drain(GRACE_SECONDS):
                    raise RuntimeError("a killed job still holds its pipe")
            self.kills += 1
            self.examine(running)
        finally:
            running.close()
        if self.kills % WIPE_EVERY == 0:
            self.wipe()

    def terminate(self, running: Running) -> None:
        """SIGTERM, which an asynchronous save holds back until it is committed, and an upload does not."""
        for pid in running.pids:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + TIMEOUT_SECONDS + GRACE_SECONDS
        while not running.closed and time.monotonic() < deadline:
            running.read(0.1)
        for pid in running.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not running.closed:
            self.fail("SIGTERM did not end the job")

    def wipe(self) -> None:
        """A new host: nothing is on its disk."""
        for path in sorted(self.chance.choice(self.disks).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.tiers["local"] = {}
        self.wipes += 1

    def await_survivor(self, running: Running, survivor: int) -> None:
        if not running.drain(3 * TIMEOUT_SECONDS + GRACE_SECONDS):
            self.fail(f"rank {survivor} hangs: {running.events[-3:]}")
            running.kill([survivor])
            running.drain(GRACE_SECONDS)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(running.pids[survivor], 0)[1])
        if code != REFUSED_EXIT:
            self.fail(f"rank {survivor} ended with {code}: {running.events[-3:]}")

    def finish(self) -> None:
        running = self.life(endless=False)
        try:
            running.wait_for("tidy", START_SECONDS)
            running.drain(START_SECONDS)
            self.examine(running)
        finally:
            running.close()
        found = in_child(lambda: look(list(map(str, self.disks)), self.address, []))
        if found["markers"] or found["torn"]:
            self.fail(f"left at the end: {found}")
        local, remote = self.tiers["local"], self.tiers["remote"]
        # A life that found nothing left to save rotates nothing.
        if len(remote) > SAVE_TOTAL_LIMIT + 3:
            self.fail(f"the store was not rotated at the end: {remote}")
        if max(local) != max(remote) or local[max(local)] != remote[max(remote)]:
            self.fail(f"the newest was not uploaded at the end: {self.tiers}")

    def examine(self, running: Running) -> None:
        outcome = running.outcome()
        self.saves += len(outcome.returned)
        for event in running.events:
            if event["kind"] == "begun":
                self.begun.setdefault(int(str(event["step"])), set()).add(int(str(event["value"])))
        self.next_value = 1 + max([self.next_value, *(max(values) for values in self.begun.values())])
        for event in running.of("crashed"):
            self.fail(f"rank {event['rank']} crashed: {event['message']}")
        for event in running.of("tidy"):
            if event["hidden"]:
                self.fail(f"the first save of a life left {event}")
        self.check_resumed(running, outcome)
        pids = list(running.pids)
        found = in_child(lambda: look(list(map(str, self.disks)), self.address, pids))
        self.cleaned += max(0, self.markers - found["markers"] + len(found["uploading"]))
        self.markers = found["markers"]
        kinds = found["uploading"]
        phase = "uploading" if "tmp" in kinds else "rotating the store" if kinds else "not uploading"
        self.phases[phase] += 1
        self.phases["in a save" if outcome.during_save else "between saves"] += 1
        self.compare(found, outcome)

    def check_resumed(self, running: Running, outcome: Outcome) -> None:
        """A life takes the newest of what both tiers held, and every rank the same one."""
        local, remote = self.tiers["local"], self.tiers["remote"]
        newest = max([*local, *remote], default=None)
        expected = 0 if newest is None else local.get(newest, remote.get(newest))
        for event in running.of("loaded"):
            if (event["step"], event["values"]) != (newest, [expected]):
                self.fail(f"rank {event['rank']} resumed {event}, of {self.tiers}")

    def compare(self, found: dict[str, Any], outcome: Outcome) -> None:
        for tier in ("local", "remote"):
            values = {int(step): seen for step, seen in found[tier].items()}
            if mixed := {step: seen for step, seen in values.items() if len(seen) != 1}:
                self.fail(f"{tier}: mixtures, or files are missing: {mixed}")
            now = {step: int(seen[0]) for step, seen in values.items()}
            for step, value in now.items():
                if value not in self.begun.get(step, ()):
                    self.fail(f"{tier}: checkpoint-{step} holds {value}, which was never saved there")
                if value < self.tiers[tier].get(step, 0):
                    self.fail(f"{tier}: checkpoint-{step} went back to {value}, of {self.tiers[tier]}")
            if max(now, default=0) < max(self.tiers[tier], default=0):
                self.fail(f"{tier}: the newest was {self.tiers[tier]}, and is {now}")
            if tier == "local" and len(now) > SAVE_TOTAL_LIMIT + 3:
                self.fail(f"{tier}: was not rotated: {now}")
            self.tiers[tier] = now
        local, remote = self.tiers["local"], self.tiers["remote"]
        if local and local[max(local)] not in outcome.allowed:
            self.fail(f"the newest on the disk holds {local[max(local)]}, of {outcome.allowed} allowed")
        if outcome.returned and not local:
            self.fail("nothing is on the disk")
        newest = max([*local, *remote], default=None)
        where = self.run if newest in local else self.address
        if found["newest"] != (None if newest is None else f"{where}/checkpoint-{newest}"):
            self.fail(f"{found['newest']} is chosen of {self.tiers}")
        if found["unmarked"]:
            self.fail(f"nothing will ever remove {found['unmarked']}")

    def fail(self, problem: str) -> None:
        self.failures.append(f"kill {self.kills}: {problem}")


def main() -> None:
    directory, environment, address, mode, kills, seed = sys.argv[1:]
    os.environ.update(json.loads(environment))
    torch.set_num_threads(1)
    Path(directory).mkdir(exist_ok=True)
    kill_job.CheckpointConfig = functools.partial(  # type: ignore[assignment,misc]
        CheckpointConfig, remote_dir=address, remote_save_total_limit=SAVE_TOTAL_LIMIT
    )
    campaign = Campaign(mode, Path(directory), address, random.Random(int(seed)))
    began = time.monotonic()
    try:
        while campaign.kills < int(kills):
            campaign.kill()
        campaign.finish()
    except RuntimeError as error:
        campaign.fail(str(error))
    told = {
        "mode": mode,
        "kills": campaign.kills,
        "wipes": campaign.wipes,
        "saves": campaign.saves,
        "cleaned": campaign.cleaned,
        "phases": dict(campaign.phases.most_common()),
        "failures": campaign.failures,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
