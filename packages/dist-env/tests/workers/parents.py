"""Processes that start others, `parents.py FOLDER MODE`: each leaves an empty file NAME.PID in the folder."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]


def sleep(name: str) -> None:
    (FOLDER / f"{name}.{os.getpid()}").touch()
    time.sleep(120)


if __name__ == "__mp_main__":
    sleep("importing")  # a spawned child, or one of a fork server, which never comes to what it is to run
if MODE in ("command", "background"):
    if MODE == "background":  # the file alone, without torch; `import dist_env` calls the same
        runpy.run_path(sys.argv[3])["die_with_torchrun"]()
    sleep(MODE)

import torch  # noqa: E402

import dist_env  # noqa: E402


class Items(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def start(method: str, name: str) -> None:
    dist_env.die_with_parent_context(method).Process(target=sleep, args=(name,), daemon=True).start()


def start_loader(name: str) -> None:
    loader = torch.utils.data.DataLoader(
        Items(), num_workers=1, worker_init_fn=lambda worker: sleep(f"{name}{worker}")
    )
    loaders.append(iter(dist_env.tie_loader_workers(loader)))


def in_short_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


loaders: list[object] = []
here = [sys.executable, __file__, str(FOLDER)]
if MODE == "parent":
    start("fork", "forked")
    in_short_thread(partial(start, "fork", "forked-by-thread"))
    start_loader("loader")
    in_short_thread(partial(start_loader, "loader-of-thread"))
    for method in ("spawn", "forkserver"):
        start(method, "imported")
    in_short_thread(partial(start, "spawn", "imported-by-thread"))
    subprocess.Popen(dist_env.die_with_parent_command([*here, "command"]))
elif MODE == "rank":
    # On purpose: what a rank starts in the background may live longer than the job.
    words = " ".join(f"'{word}'" for word in (*here, "background", dist_env.orphans.__file__))
    subprocess.run(["sh", "-c", f"{words} & setsid {words} &"], check=True)
sleep(MODE)
