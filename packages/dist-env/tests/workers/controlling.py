"""Ranks that exchange small messages over a ControlGroup, and lose one of them."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_env import (
    ControlGroup,
    DistributedEnvironment,
    RankFailedError,
    barrier,
    control_group,
    encode_value,
)

notes: dict[str, Any] = {}


def note(key: str, error: BaseException) -> None:
    rank = error.rank if isinstance(error, RankFailedError) else "none"
    notes[key] = [type(error).__name__, str(error), rank, time.time()]


def unreadable(key: str, group: ControlGroup, sent: bytes) -> None:
    """The last rank sends something else than values; all say what they are told."""
    usual = group._send

    def send(doing: str, index: int, message: bytes) -> Any:
        own = torch.frombuffer(bytearray(sent.ljust(1024, b"\0")), dtype=torch.uint8)
        return [(group.process_group.send([own], index, 9), own)]

    if group.index == group.size - 1:
        group._send = send
    try:
        group.gather(key, "own")
    except RankFailedError as error:
        note(key, error)
    group._send = usual


def sized(value: object) -> bytes:
    message = encode_value(value)
    return len(message).to_bytes(8, "big") + message


def six(env: DistributedEnvironment) -> None:
    group = ControlGroup(range(6), 600.0, doing="starting")
    notes["names"] = [group.name(index) for index in range(6)]
    notes["short"] = group.gather("saying hello", {"rank": env.rank})
    notes["equal"] = group.gather("saying the same", "same")
    notes["largest"] = list(group.largest("comparing", bytes([env.rank, 9 - env.rank, env.rank % 2, 0])))
    notes["none"] = list(group.largest("comparing", b""))
    notes["some"] = group.gather("saying something", "even" if env.rank % 2 == 0 else None)
    notes["long"] = [len(text) for text in group.gather("sending", "x" * (1000 + 1_000_000 * env.rank))]
    barrier(env, process_group=group, timeout=60, tag="between")
    if env.rank in (0, 2):
        pair = ControlGroup([0, 2], 600.0, doing="starting")
        notes["pair"] = pair.gather("pairing", env.rank)
        pair.close()
        try:
            pair.gather("pairing", 1)
        except RuntimeError as error:
            note("closed", error)
    unreadable("a huge size", group, (2**62).to_bytes(8, "big"))
    unreadable("no value", group, (3).to_bytes(8, "big") + b"???")
    unreadable("a longer value", group, sized({}).replace(b"\0", b"\1", 1))
    unreadable("of another rank", group, sized({encode_value("own"): [1, 2]}))
    unreadable("of nobody", group, sized({encode_value("own"): [5, 6, 6, 6]}))
    unreadable("of no ranks", group, sized({encode_value("own"): [5, 6], encode_value("other"): []}))
    unreadable("another type", group, sized({encode_value(7): [5, 6]}))
    if env.rank == 3:
        notes["killed"] = time.time()
        write()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.gather("saving", env.rank)
    except RankFailedError as error:
        note("killed", error)
    write()
    env.coordinator.store.add("noted", 1)
    while env.rank == 0 and env.coordinator.store.add("noted", 0) < 5:
        time.sleep(0.05)
    os._exit(0)  # leaving the environment waits for the rank that is lost


def sixteen(env: DistributedEnvironment) -> None:
    """How many connections each rank has, and whether any two can be connected in any order."""
    before = sockets()
    group = ControlGroup(range(16), 600.0, doing="starting")
    notes["equal"] = group.gather("saying the same", "same")
    notes["sockets"] = sockets() - before
    for distance in (3, 5, 6):
        others = ((env.rank + distance) % 16, (env.rank - distance) % 16)
        group.connect("passing on", others)
        received = torch.zeros(1)
        work = group.process_group.recv([received], others[1], 0)
        group.process_group.send([torch.tensor([float(env.rank)])], others[0], 0).wait()
        work.wait()
        notes[str(distance)] = int(received)
    barrier(env, process_group=group, timeout=60, tag="end")
    group.close()


def sockets() -> int:
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # what this looks with
            found += str(each.readlink()).startswith("socket:")
    return found


def failing(env: DistributedEnvironment) -> None:
    group = ControlGroup(range(2), 600.0, doing="starting")
    # Through the store: where the other rank is slow, its half of the connections may not be open yet.
    barrier(env, timeout=60, tag="open")
    if env.rank == 1:
        group.close()
        time.sleep(1.0)
        raise OSError("no such disk")
    try:
        group.gather("saving", env.rank)
    except RankFailedError as error:
        note("failed", error)


def forked(env: DistributedEnvironment) -> None:
    """A child forked beside a group with an exchange under way leaves it alone, whichever way it ends."""
    held = [ControlGroup(range(2), 60.0, doing="starting")]
    works = [] if env.rank else [held[0].all_reduce_max(torch.zeros(1, dtype=torch.uint8))]
    for how in ("close", "drop", "exit"):
        child = os.fork()
        if child == 0:
            if how == "exit":
                sys.exit(0)
            if how == "close":
                held[0].close()
            held.clear()
            works.clear()
            gc.collect()
            os._exit(0)
        end = time.monotonic() + 30
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.05)
        notes[how] = ended[0] == child and os.waitstatus_to_exitcode(ended[1])
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    barrier(env, timeout=60, tag="forked")
    works = works or [held[0].all_reduce_max(torch.ones(1, dtype=torch.uint8))]
    held[0].wait("reducing", works[0])
    notes["after"] = held[0].gather("saving", env.rank)


def interrupted(env: DistributedEnvironment) -> None:
    """Ctrl-C ends a wait at once, and closing does not wait for the timeout."""
    group = ControlGroup(range(2), 120.0, doing="starting")
    if env.rank == 0:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            group.gather("saving", 0)
        except KeyboardInterrupt:
            notes["interrupted"] = time.monotonic() - begin
        group.close()
        notes["closed"] = time.monotonic() - begin
    barrier(env, timeout=150, tag="after")


class Interrupted:
    """An exchange during which Ctrl-C is pressed."""

    def is_completed(self) -> bool:
        raise KeyboardInterrupt

    def wait(self) -> None: ...


def abandoned(env: DistributedEnvironment) -> None:
    """Ranks leave a reduction that one of them never begins, and close one after another."""
    begin = time.monotonic()
    for first in range(4):
        group = ControlGroup(range(4), 120.0, doing="starting")
        turn = (env.rank - first) % 4
        under_way = group.all_reduce_max(torch.zeros(1, dtype=torch.uint8)) if turn < 3 else None
        with suppress(KeyboardInterrupt):
            group.wait("reducing", Interrupted())
        for now in range(4):
            barrier(env, timeout=150, tag=f"{first} {now}")
            if now == turn:
                group.close()
        del under_way
    notes["closed"] = time.monotonic() - begin


def unbreakable(env: DistributedEnvironment) -> None:
    """A rank closes, and ends, though gloo does not end the exchange that it has begun."""
    group = ControlGroup(range(2), 120.0, doing="starting")
    if env.rank == 0:
        group.all_reduce_max(torch.zeros(1, dtype=torch.uint8))
        # Stands for a send that gloo has forgotten: of about 100 tries one meets it.
        control_group._break_connections = lambda group, indices: None
        begin = time.monotonic()
        group.close()
        del group
        gc.collect()
        notes["closed"] = time.monotonic() - begin
    barrier(env, timeout=150, tag="after")


def interrupted_unbreakable(env: DistributedEnvironment) -> None:
    """The same after Ctrl-C in the wait for the exchange, closed or dropped, and with one while it closes."""
    control_group._break_connections = lambda group, indices: None
    for key in ("waiting", "dropping", "closing"):
        group = ControlGroup(range(2), 120.0, doing="starting")
        if env.rank == 0:
            work = group.all_reduce_max(torch.zeros(1, dtype=torch.uint8))
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            begin = time.monotonic()
            with suppress(KeyboardInterrupt):
                group.close() if key == "closing" else group.wait("reducing", work)
            if key != "dropping":
                group.close()
            del group, work
            gc.collect()
            notes[key] = time.monotonic() - begin
    barrier(env, timeout=150, tag="after")


def opened_while_another_waits(env: DistributedEnvironment) -> None:
    """Rank 1 opens a group only after it has heard from a thread of rank 0, which opens already."""
    first = ControlGroup(range(2), 60.0, doing="starting")
    heard = threading.Thread(target=lambda: (time.sleep(1.0), barrier(env, process_group=first, timeout=60)))
    heard.start()
    if env.rank == 1:
        heard.join()
    begin = time.monotonic()
    ControlGroup(range(2), 40.0, doing="opening")
    notes["opened"] = time.monotonic() - begin
    heard.join()


def late(env: DistributedEnvironment) -> None:
    if env.rank == 0:
        try:
            ControlGroup(range(2), 1.0, doing="opening")
        except RankFailedError as error:
            note("late", error)
    barrier(env, timeout=60, tag="after")


def remade() -> None:
    """Processes 0 and 1 have a group of ranks 0 and 1; then 1 and 2 are ranks 0 and 1 of another job."""
    process, wait = int(os.environ["RANK"]), timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, process == 0, wait, False)
    for name, first in (("one", 0), ("two", 1)):
        rank = process - first
        if rank in (0, 1):
            prefix = dist.PrefixStore(name, store)
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=2, timeout=wait)
            group = ControlGroup(range(2), 30.0, doing="starting")
            notes[name] = group.gather("saying", process)
            group.close()
            dist.destroy_process_group()
    store.add("ended", 1)
    while process == 0 and store.add("ended", 0) < 3:
        time.sleep(0.1)


def write() -> None:
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


PARENT = os.getpid()
SCENES = {
    "six": six,
    "sixteen": sixteen,
    "failing": failing,
    "forked": forked,
    "interrupted": interrupted,
    "abandoned": abandoned,
    "unbreakable": unbreakable,
    "interrupted unbreakable": interrupted_unbreakable,
    "opened": opened_while_another_waits,
    "late": late,
}
if "few" in sys.argv:  # as among many ranks
    control_group._MOST_CONNECTED = 1
try:
    if sys.argv[1] == "remade":
        remade()
    else:
        with DistributedEnvironment(training_timeout=60) as environment:
            SCENES[sys.argv[1]](environment)
finally:
    if os.getpid() == PARENT:
        write()
