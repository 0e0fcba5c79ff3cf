"""Everything that four healthy ranks do together, then a stall, then a death."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dist_env import (
    DistributedEnvironment,
    DistributedEnvironmentError,
    Heartbeat,
    RankFailedError,
    RankTimeoutError,
    StallReport,
    StaticDistributedEnvironment,
    barrier,
    broadcast_object,
    gather_objects,
    get_logger,
    main_process_first,
)

NOTES = Path(os.environ["NOTES"])
FOLDER = NOTES.parent
notes: dict[str, object] = {}
logger = get_logger("worker")
TIMES: list[float] = []


def meet(env: DistributedEnvironment) -> None:
    pair = dist.new_group([0, 1] if env.rank < 2 else [2, 3], use_local_synchronization=True)
    members = dist.get_process_group_ranks(pair)
    for _ in range(3):
        time.sleep(0.05 * env.rank)
        before = time.time()
        barrier(env, timeout=20)
        TIMES.append(time.time())
        spread = gather_objects((before, time.time()), env)
        # Nobody leaves a barrier before the last one has come.
        notes.setdefault("barriers", []).append(
            min(after for _, after in spread) >= max(b for b, _ in spread)
        )
        barrier(env, timeout=20, process_group=pair)
    notes["pair"] = gather_objects(env.rank, env, process_group=pair)
    notes["pair_broadcast"] = broadcast_object({"from": env.rank}, env, members[1], process_group=pair)
    notes["broadcast"] = broadcast_object([env.rank, "x"], env, src=2)
    unlike = gather_objects("x" * 10**env.rank, env)
    notes["unlike"] = [len(text) for text in unlike]
    try:
        broadcast_object(1, env, members[0] ^ 2, process_group=pair)
    except DistributedEnvironmentError as error:
        notes["bad_src"] = str(error)
    # Whoever does not take part in the exchange of sizes would leave the others waiting.
    for exchange in (gather_objects, broadcast_object):
        try:
            exchange({"lock": threading.Lock()} if env.rank == 0 else {"plain": 1}, env)
        except TypeError as error:
            notes.setdefault("unfit", []).append(str(error))
    notes["hostile"] = [receive_hostile(env, *case) for case in HOSTILE]
    total = torch.tensor([float(env.rank)])
    dist.all_reduce(total)
    notes["sum"] = total.item()


class Bomb:
    """Unpickling it would show."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.abort, ()


PICKLE = pickle.dumps(Bomb())
HOSTILE = [(len(PICKLE), PICKLE), (2**60, PICKLE), (-7, PICKLE), (0, b""), (10, b"l*\x01\x00\x00\x00l*ab")]


def receive_hostile(env: DistributedEnvironment, size: int, data: bytes) -> str:
    """What the other ranks say of rank 0, which sends by hand what no release sends."""
    if env.rank == 0:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(env.world_size)]
        dist.all_gather(sizes, torch.tensor([size]))
        if 0 < size < 2**20:
            tensor = torch.zeros(max(size, *map(int, sizes)), dtype=torch.uint8)
            tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.all_gather([torch.empty_like(tensor) for _ in sizes], tensor)
        return ""
    try:
        return f"received {gather_objects(env.rank, env)}"
    except RankFailedError as error:
        return f"{error.rank} {error}"


def take_turns(env: DistributedEnvironment) -> None:
    order = FOLDER / "order.txt"
    with main_process_first(env, timeout=20) as first:
        if first:
            time.sleep(0.3)
            order.write_text("main was here")
        notes["first"] = [first, order.read_text()]
    with main_process_first(env, local=True, timeout=20) as first:
        notes["first_local"] = first
    try:
        with main_process_first(env, timeout=20):
            if env.rank == 0:
                raise OSError("no such data set")
    except (OSError, RankFailedError) as error:
        notes["first_failed"] = f"{type(error).__name__}: {error}"
    barrier(env, timeout=20)
    try:
        with main_process_first(env, timeout=0.5):
            if env.rank == 0:
                wait_for_files("late-1", "late-2", "late-3")
    except RankTimeoutError as error:
        notes["first_late"] = str(error)
        FOLDER.joinpath(f"late-{env.rank}").touch()


def speak(env: DistributedEnvironment) -> None:
    logger.info("spoken once")
    for _ in range(3):
        logger.warning("spoken by all")


def share_a_group(env: DistributedEnvironment) -> None:
    """Plain values over a group that somebody else formed serve as well."""
    static = StaticDistributedEnvironment(
        rank=env.rank, local_rank=env.rank, world_size=4, local_world_size=4, backend="gloo"
    )
    barrier(static, timeout=20)
    notes["static"] = gather_objects(env.rank, static)
    with DistributedEnvironment() as inner:
        notes["inner_owns"] = inner.owns_process_group
        barrier(inner, timeout=20)
    notes["still_there"] = dist.is_initialized()


def stall(env: DistributedEnvironment) -> None:
    """Rank 2 is late with its data, and rank 0 says so; then the job continues."""
    reports: list[StallReport] = []
    with Heartbeat(env, stall_timeout=3.0, interval=0.2, on_stall=reports.append) as heart:
        for step in range(3):
            heart.beat(step, "data")
            if step == 1 and env.rank == 2:
                time.sleep(5.0)
            heart.beat(step, "all_reduce")
            dist.all_reduce(torch.ones(1))
        # The watchdog gets a moment to see that the job continues.
        time.sleep(0.7)
        barrier(env, timeout=20)
    notes["stalls"] = [(r.missing, r.ranks[2].phase, r.ranks[2].step, str(r)) for r in reports]


def die(env: DistributedEnvironment) -> None:
    """Rank 3 is killed; a barrier and the heartbeat name it."""
    reports: list[StallReport] = []
    heart = Heartbeat(env, stall_timeout=6.0, interval=0.2, on_stall=reports.append).start()
    heart.beat(7, "save")
    barrier(env, timeout=20)
    if env.rank == 3:
        # Long enough for the heartbeat to have said where.
        time.sleep(0.5)
        write()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        barrier(env, timeout=10.0, tag="after the save")
    except RankTimeoutError as error:
        notes["barrier"] = [str(error), {str(rank): host for rank, host in error.missing.items()}]
    if env.rank == 0:
        notes["death"] = [(r.missing, r.ranks[3].state, r.ranks[3].phase) for r in reports]
    heart.stop()
    lose_the_store(env)


def lose_the_store(env: DistributedEnvironment) -> None:
    """Rank 0 holds the store and vanishes; who comes to a barrier after that is told."""
    write()
    if env.rank == 0:
        # The others have passed their last barrier, and noted it.
        wait_for_files("notes-1.json", "notes-2.json")
        os._exit(0)
    try:
        barrier(env, timeout=20)
    except RankFailedError as error:
        notes["store_lost"] = str(error)
    write()
    os._exit(0)


def write() -> None:
    NOTES.write_text(json.dumps(notes))


def wait_for_files(*names: str) -> None:
    """Wait until the other ranks have left these files."""
    end = time.monotonic() + 60
    while not all(FOLDER.joinpath(name).exists() for name in names) and time.monotonic() < end:
        time.sleep(0.02)


def main() -> None:
    with DistributedEnvironment(always=False, training_timeout=60) as first:
        notes["repr"] = repr(first)
        barrier(first, timeout=20)
        meet(first)
        take_turns(first)
        speak(first)
        share_a_group(first)
    notes["closed"] = not dist.is_initialized()
    # The same variables and store host again: nothing of the first opening may be left over.
    with DistributedEnvironment(training_timeout=60) as second:
        barrier(second, timeout=20)
        stall(second)
        die(second)


if __name__ == "__main__":
    main()
