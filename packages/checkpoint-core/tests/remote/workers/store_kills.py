"""Kills a job that saves to a store without end, again and again, and checks after each kill what is there.

Usage: store_kills.py DIRECTORY ENVIRONMENT ADDRESS MODE KILLS SEED, the mode being one, async or two-ranks.

Prints one JSON object: where in a save the kills hit, and every failure. Jobs are those of `kill_job.py`,
forked from this process. It never opens the store itself, because what is open cannot be forked.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Not there by itself where PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).parents[2] / "workers"))

import torch
from kill_audit import Outcome
from kill_job import MODES, REFUSED_EXIT, SAVE_TOTAL_LIMIT, Life, values_in
from kill_run import GRACE_SECONDS, ONE_ONLY_EVERY, START_SECONDS, Running

from checkpoint_core import find_latest_checkpoint
from checkpoint_core.directory import checkpoint_directories, find_leftovers
from checkpoint_core.loading import StoredState, decode, read_all
from checkpoint_core.manifest import MANIFEST_NAME, verify_checkpoint
from checkpoint_core.store_path import locate

TIMEOUT_SECONDS = 6.0
PHASES = {"tmp": "uploading", "del": "rotation", "old": "replacing"}


@dataclass(frozen=True)
class StoreLife(Life):
    """One start of the job."""

    address: str = ""

    def output_dir(self, rank: int) -> Any:
        return self.address


def in_child(action: Callable[[], object]) -> Any:
    """What an action returns that is called in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        status = 1
        try:
            with os.fdopen(writer, "w") as file:
                json.dump(action(), file)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the check failed; its error is above")
    return json.loads(text)


def look(address: str, pids: list[int]) -> dict[str, Any]:
    """What lies in the store, all of it read and compared with its manifests."""
    run = locate(address)
    newest = find_latest_checkpoint(address, verify_checksums=True)
    values, referenced = {}, set()
    for step, path in checkpoint_directories(run):
        if not (path / MANIFEST_NAME).is_file():
            continue
        manifest = verify_checkpoint(path, checksums=True)
        found = values_in(dict(manifest.metrics or {}))
        for record in manifest.components:
            for part in record.parts:
                with closing(StoredState([path / name for name in part.files], record.format)) as stored:
                    found |= values_in(decode(*read_all(stored, threads=1)))
        referenced |= {str(path / name) for name in [*manifest.files, MANIFEST_NAME]}
        missing = [name for name in manifest.files if not (path / name).is_file()]
        values[step] = missing or sorted(found)
    leftovers = find_leftovers(run)
    marked = {leftover.path.name.rpartition("-")[2] for leftover in leftovers}
    objects = [path for path in run.rglob("*") if str(path) not in referenced and path.name[0] != "."]
    return {
        "newest": None if newest is None else newest.name,
        "values": values,
        "kinds": [leftover.kind for leftover in leftovers if leftover.pid in pids],
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
    saves: int = 0
    cleaned: int = 0
    failures: list[str] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    known: dict[int, int] = field(default_factory=dict)
    markers: int = 0
    next_value: int = 1

    def life(self, *, endless: bool = True) -> Running:
        mode = MODES[self.mode]
        asynchronous = self.mode == "async" or (mode.ranks > 1 and self.chance.random() < 0.5)
        return Running(
            StoreLife(
                mode, self.directory, asynchronous, self.next_value, TIMEOUT_SECONDS, endless, self.address
            )
        )

    def kill(self) -> None:
        running = self.life()
        try:
            running.wait_for("loaded", START_SECONDS)
            if self.chance.random() < 0.7:
                running.wait_for("done", START_SECONDS)
            until = time.monotonic() + self.chance.uniform(0.0, 0.6)
            while time.monotonic() < until:
                running.read(until - time.monotonic())
            both = list(range(running.life.mode.ranks))
            one_only = len(both) > 1 and self.kills % ONE_ONLY_EVERY == ONE_ONLY_EVERY - 1
            killed = [self.chance.choice(both)] if one_only else both
            running.kill(killed)
            if one_only:
                self.await_survivor(running, 1 - killed[0])
            elif not running.drain(GRACE_SECONDS):
                raise RuntimeError("a killed job still holds its pipe")
            self.kills += 1
            self.examine(running)
        finally:
            running.close()

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
        found = in_child(lambda: look(self.address, []))
        if found["markers"] or found["torn"]:
            self.fail(f"left at the end: {found}")

    def examine(self, running: Running) -> None:
        outcome = running.outcome()
        self.saves += len(outcome.returned)
        self.next_value = 1 + max(
            [self.next_value, *(int(str(each.get("value", 0))) for each in running.events)]
        )
        for event in running.of("crashed"):
            self.fail(f"rank {event['rank']} crashed: {event['message']}")
        for event in running.of("tidy"):
            if event["hidden"]:
                self.fail(f"the first save of a life left {event}")
            self.cleaned += self.markers
            self.markers = 0
        pids = list(running.pids)
        found = in_child(lambda: look(self.address, pids))
        self.markers = found["markers"]
        kinds = [PHASES[kind] for kind in found["kinds"]]
        self.phases[kinds[0] if kinds else "in a save" if outcome.during_save else "between saves"] += 1
        self.compare(found, outcome)

    def compare(self, found: dict[str, Any], outcome: Outcome) -> None:
        values = {int(step): seen for step, seen in found["values"].items()}
        if mixed := {step: seen for step, seen in values.items() if len(seen) != 1}:
            self.fail(f"mixtures, or files are missing: {mixed}")
        on_store = {step: int(seen[0]) for step, seen in values.items() if len(seen) == 1}
        self.known |= {save.step: save.value for save in outcome.returned}
        if outcome.resumed is not None:
            self.known.setdefault(outcome.resumed.step, outcome.resumed.value)
        pending = outcome.pending
        for step, value in on_store.items():
            is_pending = pending is not None and (pending.step, pending.value) == (step, value)
            if value != self.known.get(step) and not is_pending:
                self.fail(f"checkpoint-{step} holds {value}, {self.known.get(step)} was committed")
        newest = max(on_store, default=None)
        if found["newest"] != (None if newest is None else f"checkpoint-{newest}"):
            self.fail(f"{found['newest']} is chosen of {on_store}")
        if newest is not None and on_store[newest] not in outcome.allowed:
            self.fail(f"the newest holds {on_store[newest]}, of {outcome.allowed} allowed")
        required = sorted({*self.known, *on_store}, reverse=True)[:SAVE_TOTAL_LIMIT]
        if lost := set(required) - set(on_store):
            self.fail(f"lost {lost}, there are {on_store}")
        if found["unmarked"]:
            self.fail(f"nothing will ever remove {found['unmarked']}")
        self.known = on_store

    def fail(self, problem: str) -> None:
        self.failures.append(f"kill {self.kills}: {problem}")


def main() -> None:
    directory, environment, address, mode, kills, seed = sys.argv[1:]
    os.environ.update(json.loads(environment))
    torch.set_num_threads(1)
    Path(directory).mkdir(exist_ok=True)
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
        "saves": campaign.saves,
        "cleaned": campaign.cleaned,
        "phases": dict(campaign.phases.most_common()),
        "failures": campaign.failures,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
