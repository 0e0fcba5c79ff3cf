"""Starting the processes of a job on this machine, when no launcher has."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from .program import EXIT_ABORTED, EXIT_USER_ERROR, PROG

EXIT_CODES_VARIABLE = "LLAMA_PRETRAIN_EXIT_CODES"
"""Names the folder in which each process leaves its exit code: a launcher that was told to stop does not wait
for them, and tells no codes."""

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
_SECONDS_TO_SAVE = 300


def is_launched() -> bool:
    """Whether a launcher, such as torchrun or a script of Slurm, has started this process."""
    return any(name in os.environ for name in _LAUNCHER_VARIABLES)


def launch(words: Sequence[str], processes: int) -> int:
    """Start the same command in so many processes, with torch elastic, and wait for them.

    A signal is passed on to them: each finishes its step, they save together and end.

    Args:
        words: The command line, without the program's name.
        processes: How many, all on this machine.

    Returns:
        The exit code of the job: that of all processes if they agree; else 2 if one says that the input is
        wrong, and 1 if not.
    """
    # Imported here: a run of one process needs no launcher.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # Its own report on a process that failed is a page long; the process has said what is wrong.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="llama-pretrain-") as folder:
        codes = Path(folder) / "exit-codes"
        codes.mkdir()
        os.environ[EXIT_CODES_VARIABLE] = str(codes)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            # Without a folder of ours torch makes one that it leaves behind.
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
            shutdown_timeout=_SECONDS_TO_SAVE,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "llama_pretrain", *words)
        except ChildFailedError as error:
            # Another that fails for want of this one may be found in the same moment.
            ended = {rank: failure for rank, failure in error.failures.items() if failure.exitcode < 0}
            if ended:
                rank = min(ended, key=lambda each: ended[each].timestamp)
                print(f"{PROG}: error: rank {rank} was ended by {ended[rank].signal_name()}", file=sys.stderr)
        except SignalException:
            pass  # what the processes made of it is in their exit codes
        return _job_code(_exit_codes(codes), processes)


def leave_exit_code(code: int) -> int:
    """Leave the exit code of this process where its launcher looks for it, and return it."""
    folder = os.environ.get(EXIT_CODES_VARIABLE)
    if folder is not None and is_launched() and Path(folder).is_dir():
        (Path(folder) / os.environ["RANK"]).write_text(str(code), encoding="ascii")
    return code


def _exit_codes(folder: Path) -> list[int]:
    return [int(path.read_text(encoding="ascii")) for path in folder.iterdir()]


def _job_code(codes: Sequence[int], processes: int) -> int:
    if len(codes) == processes and len(set(codes)) == 1:
        return codes[0]
    if EXIT_USER_ERROR in codes:
        return EXIT_USER_ERROR
    return EXIT_ABORTED
