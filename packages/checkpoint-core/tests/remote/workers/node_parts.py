"""Nodes that keep a checkpoint together, each on a disk of its own, with a second tier in a store.

Usage: node_parts.py DIRECTORY ENVIRONMENT ADDRESS SCENARIO. Prints what the ranks saw, as JSON.
"""

import json
import logging
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Not there by itself where PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).parents[2] / "workers"))

import layouts
import torch
import torch.distributed as dist
from layouts import Held, counts

from checkpoint_core import saving, tier_upload, tiers  # isort: skip
from checkpoint_core import CheckpointConfig, CheckpointError, CheckpointManager, StaticStatefulProvider
from checkpoint_core.manifest import read_manifest, verify_checkpoint
from checkpoint_core.store_path import locate
from dist_env import StaticDistributedEnvironment, open_object_store

DIRECTORY, ADDRESS = Path(sys.argv[1]), sys.argv[3]
FOUR = "shards on 4"


class Notes(logging.Handler):
    """What the package has logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        logging.getLogger("checkpoint_core").addHandler(self)
        logging.getLogger("checkpoint_core").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts


class NodeJob(layouts.Job):
    """One rank of a job whose nodes share no disk."""

    disks: Sequence[str] = ()
    """The disk of each node."""

    def __init__(self, directory: Path, layout: str, rank: int) -> None:
        super().__init__(directory, layout, rank)
        size = self.layout.world // len(self.disks)
        self.node = rank // size
        self.disk = directory / self.disks[self.node]
        self.env = StaticDistributedEnvironment(
            rank=rank,
            local_rank=rank % size,
            world_size=self.layout.world,
            local_world_size=size,
            backend="gloo",
        )
        self.notes = Notes()

    def manager(self, held: Held, run: str = "run", **options: Any) -> CheckpointManager:
        config = CheckpointConfig(
            self.disk / run,
            **{
                "remote_dir": f"{ADDRESS}/{run}",
                "save_on_each_node": True,
                "timeout_seconds": 60,
                "max_shard_size": 8000,
                **options,
            },
        )
        provider = StaticStatefulProvider(held.components(self.layout))
        return CheckpointManager(config, dist=self.env, stateful_provider=provider)

    def save_steps(self, run: str, *steps: int, **options: Any) -> dict[str, object]:
        """Save the trained state, and wait for the uploads."""
        held = Held(self.layout, self.rank, seed=1, train=True)
        with self.manager(held, run, **options) as manager:
            for step in steps:
                manager.save_checkpoint(step, metrics={"eval_loss": float(step)})
            manager.wait_for_upload()
        return {"notes": self.notes.take()}

    def load_newest(self, run: str, path: str | None = None, **options: Any) -> dict[str, object]:
        """Load into a new model, and compare with the trained one."""
        held = Held(self.layout, self.rank, seed=2, train=False)
        with self.manager(held, run, **options) as manager:
            try:
                loaded = manager.load_checkpoint(None if path is None else self.disk / path)
            except CheckpointError as error:
                return {"error": str(error), "notes": self.notes.take()}
        if loaded is None:
            return {"loaded": None, "notes": self.notes.take()}
        seen = {**self.compare(held), **counts(held, loaded)}
        return {"loaded": str(loaded.path), "notes": self.notes.take(), **seen}

    def model_alone(self, run: str, path: str) -> dict[str, object]:
        """The weights of a checkpoint, and nothing else of it."""
        held = Held(self.layout, self.rank, seed=2, train=False)
        with self.manager(held, run) as manager:
            manager.load_model(self.disk / path)
        return {**self.compare(held), "loaded": path, "notes": self.notes.take()}

    def load_best(self, run: str, *steps: int, **options: Any) -> dict[str, object]:
        """Resume, save some steps, and take the weights of the best checkpoint there is."""
        held = Held(self.layout, self.rank, seed=2, train=False)
        with self.manager(held, run, **options) as manager:
            manager.load_checkpoint()
            for step in steps:
                manager.save_checkpoint(step, metrics={"eval_loss": float(step)})
            best = [str(each.path) for each in manager.best_checkpoints()]
            manager.load_model(best[0])
        return {**self.compare(held), "loaded": best[0], "notes": self.notes.take()}

    def export(self, run: str) -> dict[str, object]:
        held = Held(self.layout, self.rank, seed=1, train=True)
        with self.manager(held, run) as manager:
            manager.save_model(self.disk / "exported")
        return {}

    def store_away(self) -> dict[str, object]:
        """Checkpoint 3 gets to no store; the run is told so, and the next one brings it."""
        seen: dict[str, object] = {}
        held = Held(self.layout, self.rank, seed=1, train=True)
        reach = os.environ["AWS_ENDPOINT_URL"]
        manager = self.manager(held)
        manager.load_checkpoint()
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
        open_object_store.cache_clear()
        manager.save_checkpoint(3)
        try:
            manager.wait_for_upload()
        except CheckpointError as error:
            seen["waiting"] = str(error)
        manager.give_up_upload()
        try:
            manager.close()
        except CheckpointError as error:
            seen["closing"] = str(error)
        os.environ["AWS_ENDPOINT_URL"] = reach
        open_object_store.cache_clear()
        return seen

    def one_node_leaves(self) -> dict[str, object]:
        """The second node is not there any more when rank 0 asks it to upload."""
        held = Held(self.layout, self.rank, seed=1, train=True)
        manager = self.manager(held, "leaves", timeout_seconds=20)
        seen: dict[str, object] = {}
        manager.save_checkpoint(1)
        manager.wait_for_upload()
        peers = manager._peers
        assert peers is not None
        if self.node:
            peers.close()
        dist.barrier()
        manager.save_checkpoint(2)
        try:
            manager.wait_for_upload()
        except CheckpointError as error:
            seen["error"] = str(error)
        manager.give_up_upload()
        try:
            manager.close()
        except CheckpointError as error:
            seen["closing"] = str(error)
        return seen

    def late_publisher(self) -> dict[str, object]:
        """The second node publishes late, while the upload before ends and rank 0 looks what is next."""
        publish, upload = saving.publish, tier_upload.FileUpload.run

        def late(staging: Path, final: Path, step: int) -> None:
            if step == 2 and self.rank == 2:
                time.sleep(3)
            publish(staging, final, step)

        def long(files: tier_upload.FileUpload, names: Sequence[str]) -> None:
            upload(files, names)
            if self.rank == 0 and files.source.name == "checkpoint-1":
                time.sleep(1.5)

        saving.publish, tier_upload.FileUpload.run = late, long  # type: ignore[method-assign]
        return self.save_steps("run", 1, 2)

    def late_request(self) -> dict[str, object]:
        """Rank 0 is slow to ask for the upload, while the others close."""
        request = tiers.RemoteTier.request

        def late(tier: tiers.RemoteTier, *arguments: Any, **options: Any) -> None:
            time.sleep(1)
            request(tier, *arguments, **options)

        tiers.RemoteTier.request = late  # type: ignore[method-assign]
        held = Held(self.layout, self.rank, seed=1, train=True)
        with self.manager(held) as manager:
            manager.save_checkpoint(1)
        return {}

    def saved_again(self, reader: int) -> dict[str, object]:
        """What was resumed from is saved again with other values while its upload reads it on one node."""
        content, publish, place = (
            tier_upload.FileUpload._content,
            saving.publish,
            self.disk / "run/checkpoint-1",
        )
        old = read_manifest(place).save_id

        def after_publishing(files: tier_upload.FileUpload, name: str) -> Any:
            until = time.monotonic() + 60
            while self.rank == reader and time.monotonic() < until:
                try:
                    if read_manifest(place).save_id != old:
                        break
                except CheckpointError:
                    pass  # Between two renames.
                time.sleep(0.01)
            return content(files, name)

        def late(staging: Path, final: Path, step: int) -> None:
            if self.rank != reader:
                time.sleep(1)
            publish(staging, final, step)

        tier_upload.FileUpload._content, saving.publish = after_publishing, late  # type: ignore[method-assign]
        held = Held(self.layout, self.rank, seed=2, train=False)
        with self.manager(held, remote_dir=f"{ADDRESS}/{reader}") as manager:
            manager.load_checkpoint()
            for parameter in held.parameters:
                parameter.data.add_(1.0)
            manager.save_checkpoint(1)
            manager.save_checkpoint(2)
            manager.wait_for_upload()
        return {"notes": self.notes.take()}

    def frozen(self) -> dict[str, object]:
        """The second node stands still while it uploads, until rank 0 has said whom it waits for."""
        content, mark = tier_upload.FileUpload._content, DIRECTORY / "frozen"
        # Two threads upload: whichever comes first.
        first = threading.Lock()

        def stop_once(files: tier_upload.FileUpload, name: str) -> Any:
            if self.rank == 2 and first.acquire(blocking=False):
                mark.with_suffix(".new").write_text(str(os.getpid()))
                mark.with_suffix(".new").rename(mark)
                os.kill(os.getpid(), signal.SIGSTOP)
            return content(files, name)

        tier_upload.FileUpload._content = stop_once  # type: ignore[method-assign]
        held = Held(self.layout, self.rank, seed=1, train=True)
        told: list[str] = []
        with self.manager(held) as manager:
            manager.save_checkpoint(1)
            while self.rank == 0 and not any("because" in each for each in told) and len(told) < 40:
                try:
                    manager._tier.wait(0.5)  # type: ignore[union-attr]
                except CheckpointError as error:
                    told.append(str(error))
            if self.rank == 0:
                os.kill(int(mark.read_text()), signal.SIGCONT)
            manager.wait_for_upload()
        return {"told": told[-1:]}

    def continues_after_all(self) -> dict[str, object]:
        """More open files than select() takes, an upload that was given up, and a child that unwinds."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = Held(self.layout, self.rank, seed=1, train=True)
        many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        manager = self.manager(held)
        manager.save_checkpoint(1)
        manager.wait_for_upload()
        manager.give_up_upload()
        child = os.fork()
        if child == 0:
            manager._peers.close()  # type: ignore[union-attr]
            os._exit(7)
        until = time.monotonic() + 20
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.05)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
        manager.save_checkpoint(2)
        manager.wait_for_upload()
        manager.close()
        for each in many:
            os.close(each)
        names = [thread.name for thread in threading.enumerate()]
        return {"child": os.waitstatus_to_exitcode(ended[1]) if ended[0] else None, "threads": names}

    def refused(self, run: str, **options: Any) -> dict[str, object]:
        """What a save is refused with."""
        held = Held(self.layout, self.rank, seed=1, train=True)
        try:
            with self.manager(held, run, **options) as manager:
                manager.save_checkpoint(1)
        except CheckpointError as error:
            return {"error": str(error)}
        return {}

    def look(self, run: str) -> dict[str, list[str]]:
        """The checkpoints in the store that are whole to the last bit, and what belongs to none."""
        place = locate(f"{ADDRESS}/{run}")
        whole, known = [], set()
        # Some servers show the folder of what was deleted.
        for path in sorted(each for each in place.glob("checkpoint-*") if (each / "manifest.json").is_file()):
            manifest = verify_checkpoint(path, checksums=True)
            whole.append(path.name)
            known |= {str(path / name) for name in [*manifest.files, "manifest.json"]}
        left = sorted(str(path) for path in place.rglob("*") if str(path) not in known)
        return {"committed": whole, "left": left}


def go(action: str, *arguments: Any, disks: str = "ab", layout: str = FOUR, **options: Any) -> list[Any]:
    """Run one job, on nodes with these disks."""
    NodeJob.disks = list(disks)
    go.count += 1  # type: ignore[attr-defined]
    name = f"{action} {go.count}"  # type: ignore[attr-defined]

    def act(self: NodeJob) -> object:
        return getattr(NodeJob, action)(self, *arguments, **options)

    setattr(NodeJob, name, act)
    return layouts.run_ranks(DIRECTORY, layout, name)


go.count = 0  # type: ignore[attr-defined]


def held_files(step: int, disks: str = "ab", run: str = "run") -> dict[str, list[str]]:
    """The files of a checkpoint by disk, without the manifest."""
    found = {}
    for disk in disks:
        place = DIRECTORY / disk / run / f"checkpoint-{step}"
        files = sorted(file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file())
        found[disk] = [name for name in files if name != "manifest.json"]
    return found


def in_store(run: str = "run") -> dict[str, list[str]]:
    """What the store has, seen by a process of its own: who has used a store may not fork."""
    return go("look", run, layout="whole", disks="a")[0]


def saved() -> dict[str, object]:
    return {"save": go("save_steps", "run", 1)}


def roundtrip() -> dict[str, object]:
    """Save, look at the disks and the store, load; with the disks in the other order, and with one empty."""
    seen: dict[str, object] = {"save": go("save_steps", "run", 1, 2)}
    seen["held"] = held_files(2)
    seen["manifest"] = sorted(read_manifest(DIRECTORY / "a/run/checkpoint-2").files)
    seen["same manifest"] = len(
        {(DIRECTORY / disk / "run/checkpoint-2/manifest.json").read_bytes() for disk in "ab"}
    )
    seen["store"] = in_store()
    seen["load"] = go("load_newest", "run")
    seen["swapped"] = go("load_newest", "run", disks="ba")
    seen["lost"] = go("load_newest", "run", disks="ac")
    seen["model alone"] = go("model_alone", "run", "run/checkpoint-1")
    go("export", "run")
    seen["exported"] = {"a": sorted(path.name for path in (DIRECTORY / "a" / "exported").iterdir())}
    seen["exported too"] = (DIRECTORY / "b/exported").exists()
    merged = DIRECTORY / "m/run/checkpoint-2"
    for disk in "ab":
        shutil.copytree(DIRECTORY / disk / "run/checkpoint-2", merged, dirs_exist_ok=True)
    seen["merged"] = go(
        "load_newest", "run", layout="whole", disks="m", remote_dir=None, save_on_each_node=False
    )
    return seen


def other_nodes() -> dict[str, object]:
    go("save_steps", "run", 1, 2)
    return {
        "more nodes": go("load_newest", "run", disks="abcd"),
        "named": go("load_newest", "run", "run/checkpoint-1"),
        "other layout": go("load_newest", "run", layout="2 stages"),
        "one node": go("load_newest", "run", layout="whole", disks="a"),
    }


def not_uploaded() -> dict[str, object]:
    """The newest checkpoint is on the disks alone; then one of them is lost, or damaged."""
    seen: dict[str, object] = {}
    go("save_steps", "run", 1, 2)
    seen["away"] = go("store_away")
    seen["store"] = in_store()
    shutil.copytree(DIRECTORY / "b", DIRECTORY / "B")
    damaged = next(path for path in (DIRECTORY / "B/run/checkpoint-3").rglob("*.safetensors"))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    seen["damaged"] = go("load_newest", "run", disks="aB", **READ_ONLY)
    seen["lost"] = go("load_newest", "run", disks="ac", **READ_ONLY)
    seen["newest named"] = go("load_newest", "run", "run/checkpoint-3", disks="ac", **READ_ONLY)
    seen["copies"] = go("load_newest", "run", disks="ac", remote_dir=None)
    # Resumed on all nodes, the checkpoint gets to the store after all.
    seen["back"] = go("load_newest", "run")
    seen["store then"] = in_store()
    return seen


READ_ONLY: dict[str, Any] = {"remote_save_total_limit": 1}
"""Of what is loaded nothing is uploaded that the store has."""


def leaves() -> dict[str, object]:
    return {"leaves": go("one_node_leaves"), "store": in_store("leaves")}


def races() -> dict[str, object]:
    seen: dict[str, object] = {"late publisher": go("late_publisher"), "store": in_store()}
    for disk in "ab":
        shutil.rmtree(DIRECTORY / disk)
    global ADDRESS
    ADDRESS = f"{ADDRESS}2"
    go("late_request")
    return {**seen, "store of late request": in_store()}


def frozen() -> dict[str, object]:
    return {"ranks": go("frozen"), "store": in_store()}


def continued() -> dict[str, object]:
    return {"ranks": go("continues_after_all"), "store": in_store()}


def new_main() -> dict[str, object]:
    """Rank 0 is on a node that has nothing of what only the disks of others have."""
    go("save_steps", "run", 1, 2)
    go("store_away")
    seen: dict[str, object] = {"before": in_store(), "load": go("load_newest", "run", disks="cabd")}
    return {**seen, "store": in_store()}


def best() -> dict[str, object]:
    """The best checkpoint on all nodes, without one of them, and by a job of one node."""
    options = {"best_metric": "eval_loss", "preserve_n_best": 1, "save_total_limit": 1}
    go("save_steps", "run", 1, 2, **options)
    seen: dict[str, object] = {"all": go("load_best", "run", **options)}
    seen["lost"] = go("load_best", "run", 3, 4, 5, disks="ca", **options)
    for disk in "ac":
        seen[disk] = sorted(path.name for path in (DIRECTORY / disk / "run").iterdir())
    return {**seen, "one node": go("load_best", "run", disks="a", layout="whole", **options)}


def deleted() -> dict[str, object]:
    """A component is deleted by hand; then the files of a node are copied over those of the other."""
    go("save_steps", "run", 1)
    for file in (DIRECTORY / "b/run/checkpoint-1").glob("rng.rank3*"):
        file.unlink()
    seen: dict[str, object] = {"load": go("load_newest", "run")}
    shutil.copytree(DIRECTORY / "a", DIRECTORY / "c")
    return {**seen, "copy": go("load_newest", "run", disks="ac")}


def saved_again() -> dict[str, object]:
    go("save_steps", "run", 1)
    for disk in "ab":
        shutil.copytree(DIRECTORY / disk, DIRECTORY / disk.upper())
    seen: dict[str, object] = {"here": go("saved_again", 0), "store 0": in_store("0")}
    return {**seen, "there": go("saved_again", 2, disks="AB"), "store 2": in_store("2")}


def power_cut() -> dict[str, object]:
    """The machines lose their power before the second node has published; the store has nothing."""
    go("save_steps", "run", 1)
    made = DIRECTORY / "b/run/checkpoint-1"
    made.rename(made.with_name(".tmp-checkpoint-1-0123abcd-4711-1-89abcdef"))
    return {"load": go("load_newest", "run", remote_dir=f"{ADDRESS}/other")}


def misplaced() -> dict[str, object]:
    """Nodes save to a directory that they share, or upload to a place that each has for itself."""
    seen: dict[str, object] = {"shared": go("refused", "run", disks="aa")}
    seen["left"] = [path.name for path in (DIRECTORY / "a/run").iterdir()]
    seen["memory"] = go("refused", "memory", remote_dir="memory://name/run")
    seen["file"] = go("refused", "file", remote_dir=f"file://{DIRECTORY}/stored/run")
    return {**seen, "stored": sorted(path.name for path in (DIRECTORY / "stored/run").iterdir())}


def layout(name: str) -> dict[str, object]:
    run = name.replace(" ", "-")
    go("save_steps", run, 1, layout=name, async_save=True)
    return {
        "load": go("load_newest", run, layout=name),
        "lost": go("load_newest", run, layout=name, disks="bc"),
    }


SCENARIOS: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(saved, roundtrip, other_nodes, not_uploaded, leaves, races, continued, new_main),
        *(best, deleted, misplaced, frozen, power_cut, saved_again),
    )
}


def main() -> None:
    os.environ.update(json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    layouts.Job = NodeJob  # type: ignore[misc]
    scenario = sys.argv[4]
    print(json.dumps(SCENARIOS[scenario]() if scenario in SCENARIOS else layout(scenario)))


if __name__ == "__main__":
    main()
