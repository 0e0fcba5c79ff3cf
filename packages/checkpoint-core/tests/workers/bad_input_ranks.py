"""Bad input on two ranks. Usage: bad_input_ranks.py DIRECTORY. Writes DIRECTORY/<group>/rank<k>.json.

Every group of ranks is forked from this process, before it has a process group, so that torch is imported
once. All groups run at the same time.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from bad_input_group import Ranks
from bad_input_kills import Kill
from bad_input_loads import Loads
from bad_input_nodes import Nodes
from bad_input_saves import Saves

GROUPS: dict[str, Callable[[int, Path], Ranks]] = {
    "saves": Saves,
    "loads": Loads,
    "nodes": Nodes,
    **{
        f"killed in {phase}, rank {victim}": lambda rank, directory, phase=phase, victim=victim: Kill(  # type: ignore[misc]
            rank, directory, phase, victim
        )
        for phase, victim in (("capture", 1), ("write", 1), ("write", 0), ("background", 1), ("load", 1))
    },
}


def run_rank(group: str, rank: int, directory: Path, port: int) -> None:
    store = dist.PrefixStore(group, dist.TCPStore("127.0.0.1", port, is_master=False))
    limit = timedelta(seconds=90)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=limit)
    ranks = GROUPS[group](rank, directory)
    ranks.scenarios()
    (directory / f"rank{rank}.json").write_text(json.dumps(ranks.seen))
    del ranks
    gc.collect()
    dist.destroy_process_group()


def start_store() -> tuple[int, int]:
    """A process that holds the store, as a launcher does, so that the store outlives a killed rank.

    Returns:
        Its process id, and the port.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Not in the parent: the store has threads, and a process with threads should not fork.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write_end, str(store.port).encode())
        signal.pause()
    return child, int(os.read(read_end, 100))


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    launcher, port = start_store()
    children: dict[int, tuple[str, int]] = {}
    for group in GROUPS:
        (directory / group).mkdir()
        for rank in range(2):
            child = os.fork()
            if child == 0:
                run_rank(group, rank, directory / group, port)
                return
            children[child] = (group, rank)
    codes: dict[str, list[int]] = {group: [0, 0] for group in GROUPS}
    for child, (group, rank) in children.items():
        codes[group][rank] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    (directory / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
