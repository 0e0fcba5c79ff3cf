"""The environment of a process of a distributed job, and the process group that belongs to it."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import socket
import sys
import threading
from datetime import timedelta
from types import TracebackType
from typing import Self

from torch import distributed as dist

from dist_env.coordination import (
    Coordinator,
    RankRecord,
    coordinator_of,
    forget_coordinator,
    prefix_store,
    use_coordinator,
)
from dist_env.device import DeviceMap, choose_backend, choose_device, device_identity, set_current_device
from dist_env.errors import DistributedEnvironmentError, RankFailedError, one_line
from dist_env.flight_recorder import FlightRecorder, choose_directory, use_recorder
from dist_env.handshake import join
from dist_env.interface import forget_meshes
from dist_env.liveness import end_liveness
from dist_env.logging import get_logger, parse_level, set_speaker
from dist_env.rendezvous import Rendezvous, open_store
from dist_env.variables import ExportedVariables, resolve_variables, unused_launcher

logger = get_logger("dist_env")

# The holder of the store waits this long for the other ranks to sign off, because they still need it.
_LEAVE_SECONDS = 30.0
# After a failure it waits only this long, for the others to read the reason.
_FAREWELL_SECONDS = 2.0
# A store on a host that is frozen or cut off never answers; a process that failed ends nevertheless.
_TELL_SECONDS = 10.0


class DistributedEnvironment:
    """Rank, device and process group of this process; a context manager.

    The constructor reads and checks; it changes nothing. `open` (or `with`) exports missing variables, sets
    the current device, meets the other ranks and forms the process group. `close` (or the end of `with`)
    undoes exactly that: it destroys the group if it formed it, and unsets the variables that it exported.

    A variable of the launcher (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
    `MASTER_PORT`) wins over the argument of the same name. Without either, the job is one process on this
    host; a job whose `MASTER_ADDR` is this very host takes its local numbers from the global ones.

    If a group already exists it is used with a warning, and left alone at the end.

    Args:
        rank: Global rank, for a missing `RANK`. Default 0.
        local_rank: Rank on this host, for a missing `LOCAL_RANK`. Default 0.
        world_size: Number of processes, for a missing `WORLD_SIZE`. Default 1.
        local_world_size: Processes on this host, for a missing `LOCAL_WORLD_SIZE`. Default 1.
        master_addr: Host of rank 0, for a missing `MASTER_ADDR`. Default `localhost`.
        master_port: Port of the rendezvous, for a missing `MASTER_PORT`. Default 29501; if nobody names a
            port and all processes run on this host, another one is taken when 29501 is not free.
        backend: `gloo`, `nccl`, ..., or pairs such as `cpu:gloo,cuda:nccl`. None takes the one that PyTorch
            registers for the device: `gloo` on CPU, `nccl` on CUDA, `xccl` on XPU.
        device_map: Accelerator index by global rank; a mapping or a sequence. None uses the local rank.
        log_level: Level of the loggers of `get_logger` while the environment is open.
        always: Form a group even for one process.
        no_accelerator: Use the CPU although an accelerator is there.
        init_timeout: Seconds that meeting the other ranks and forming the group may take.
        training_timeout: Seconds that a collective may take afterwards, and default of `barrier`.
        flight_recorder: Directory to which each rank writes the collectives that it has called, when a
            `Heartbeat` finds a stall, a wait of this package times out, or the rank leaves with an error;
            `python -m dist_env doctor --dump DIRECTORY` reads them. The variable `DIST_ENV_FLIGHT_RECORDER`
            wins over it. None writes nothing.

    Raises:
        DistributedEnvironmentError: A variable or argument is wrong; names it, the rule and the fix.
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        backend: str | None = None,
        device_map: DeviceMap | None = None,
        log_level: str | int = "INFO",
        always: bool = True,
        no_accelerator: bool = False,
        init_timeout: float = 300.0,
        training_timeout: float = 1800.0,
        flight_recorder: str | os.PathLike[str] | None = None,
    ) -> None:
        if dist.is_available() and dist.is_initialized():
            # Whoever formed the group without the variables has told the group what they would say.
            rank = dist.get_rank() if rank is None else rank
            world_size = dist.get_world_size() if world_size is None else world_size
        self._variables = resolve_variables(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=master_addr,
            master_port=master_port,
        )
        for name, seconds in (("init_timeout", init_timeout), ("training_timeout", training_timeout)):
            if not seconds > 0:
                raise DistributedEnvironmentError(f"{name}={seconds!r} is not a positive number of seconds.")
        if self.world_size > 1 and not dist.is_available():
            raise DistributedEnvironmentError(
                f"WORLD_SIZE={self.world_size} needs torch.distributed, which this build of torch lacks. "
                "Install a build that has it, or start one process."
            )
        self.hostname: str = socket.gethostname()
        self.master_port = self._variables.master_port
        self.device_map = device_map
        self.device = choose_device(
            self.rank, self.local_rank, device_map=device_map, no_accelerator=no_accelerator
        )
        self.backend = choose_backend(self.device, backend)
        self.always = always
        self.no_accelerator = no_accelerator
        self.log_level: int = parse_level(log_level)
        self.init_timeout: float = float(init_timeout)
        self.training_timeout: float = float(training_timeout)
        self.flight_recorder, self._overruled = choose_directory(flight_recorder)
        self.coordinator: Coordinator | None = None
        self._recorder: FlightRecorder | None = None
        self.owns_process_group = False
        self._exported = ExportedVariables()
        self._rendezvous: Rendezvous | None = None
        self._speaker_before: tuple[int | None, int, int] | None = None
        self._opened_by = 0

    @property
    def rank(self) -> int:
        """Global rank."""
        return self._variables.rank

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this host."""
        return self._variables.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self._variables.world_size

    @property
    def local_world_size(self) -> int:
        """Number of processes of the job on this host."""
        return self._variables.local_world_size

    @property
    def master_addr(self) -> str:
        """Host of rank 0."""
        return self._variables.master_addr

    @property
    def device_type(self) -> str:
        """`device.type`."""
        return self.device.type

    @property
    def use_accelerator(self) -> bool:
        """Whether the device is an accelerator."""
        return self.device.type != "cpu"

    @property
    def store_holder(self) -> int | None:
        """The rank that holds the job's store; None if the launcher holds it, or if that is not known."""
        return 0 if self._rendezvous is not None and self._rendezvous.held_by_rank_0 else None

    @property
    def is_open(self) -> bool:
        """Whether `open` was called and `close` was not."""
        return self._speaker_before is not None

    def open(self) -> Self:
        """Take effect: variables, device, process group.

        Returns:
            This environment.

        Raises:
            DistributedEnvironmentError: The port is taken, the host unknown, or ranks contradict one another.
            RankTimeoutError: Ranks did not join within `init_timeout`; names them.
            RankFailedError: Another rank refused the environment; carries its reason.
            RuntimeError: The environment is open already.
        """
        if self.is_open:
            raise RuntimeError(f"{self!r} is open already. Close it first, or make another one.")
        self._opened_by = os.getpid()
        self._speaker_before = set_speaker(self.rank, self.world_size, self.log_level)
        atexit.register(self._close_at_exit)
        try:
            for text in (*self._variables.overruled, *filter(None, [self._overruled])):
                logger.warning("%s.", text)
            if self.world_size == 1 and (problem := unused_launcher()) is not None:
                logger.warning("%s", problem)
            set_current_device(self.device)
            if self.flight_recorder is not None:
                self._recorder = FlightRecorder(self.flight_recorder, self.rank, self.world_size)
                self._recorder.start()
            self._join_group()
            if self._recorder is not None:
                if self.world_size > 1:
                    self._recorder.agree(coordinator_of(self).store)
                use_recorder(self._recorder)
            self._exported.export(self._variables, self.master_port)
        except BaseException as error:
            self._release(error)
            raise
        return self

    def close(self) -> None:
        """Undo what `open` did. Closing twice does nothing."""
        self._release(None)

    def set_training_timeout(self, seconds: float) -> None:
        """Set how long later collectives may take, for example around a slow first step.

        Args:
            seconds: Positive number of seconds.

        Raises:
            DistributedEnvironmentError: The number is not positive.
        """
        if not seconds > 0:
            raise DistributedEnvironmentError(
                f"training_timeout={seconds!r} is not a positive number of seconds."
            )
        self.training_timeout = float(seconds)
        if self.is_open and dist.is_initialized():
            _set_group_timeout(self.training_timeout)

    def _join_group(self) -> None:
        if not dist.is_available() or (self.world_size == 1 and not self.always):
            return
        if dist.is_initialized():
            self._adopt_group()
            return
        self._rendezvous = open_store(self._variables, self.init_timeout)
        self.master_port = self._rendezvous.port
        record = RankRecord.of(self, device_identity=device_identity(self.device))
        self.coordinator = join(self._rendezvous.store, record, self.init_timeout)
        dist.init_process_group(
            self.backend,
            store=prefix_store("group", self.coordinator.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.init_timeout),
            # Binding the device lets the backend connect at once and keeps barriers on the right device.
            device_id=self.device if "ccl" in (self.backend or "") else None,
        )
        self.owns_process_group = True
        self.coordinator.holder = self.store_holder
        use_coordinator(self.coordinator)
        _set_group_timeout(self.training_timeout)

    def _adopt_group(self) -> None:
        place = (dist.get_rank(), dist.get_world_size())
        if place != (self.rank, self.world_size):
            raise DistributedEnvironmentError(
                f"RANK={self.rank}, WORLD_SIZE={self.world_size} contradict the process group that exists "
                f"already (rank {place[0]} of {place[1]}). Set both to the group's values, or unset them."
            )
        self.backend = dist.get_backend()
        logger.warning(
            "a process group (%s, %d ranks) exists already; it is used and not destroyed at the end.",
            self.backend,
            self.world_size,
        )

    def _close_at_exit(self) -> None:
        # Set by the interpreter when an exception ends the program.
        self._release(getattr(sys, "last_value", None))

    def _release(self, error: BaseException | None) -> None:
        if self._speaker_before is None or os.getpid() != self._opened_by:
            return  # in a forked child: the group, and what is told to the others, are its parent's
        try:
            if error is not None and self._recorder is not None and not self._recorder.dumped:
                # Before the others hear of it: they may end the job at once.
                self._recorder.dump(f"left with {one_line(error)}")
            if error is None or self.world_size == 1:
                self._warn_of(self._sign_off(_LEAVE_SECONDS))
                close = _close_group
            else:
                self._tell_failure(error)
                close = _abandon_group
            if self.owns_process_group and dist.is_initialized():
                self.coordinator = None
                current = forget_coordinator()
                if current is not None:
                    end_liveness(current)
                close()
        finally:
            self.owns_process_group = False
            self.coordinator = None
            self._rendezvous = None
            self._exported.restore()
            if self._recorder is not None:
                use_recorder(None)
                self._recorder.stop()
                self._recorder = None
            set_speaker(*self._speaker_before)
            self._speaker_before = None
            atexit.unregister(self._close_at_exit)

    def _sign_off(self, patience: float) -> list[int]:
        """Tell the holder of the store that this rank needs it no more; the holder waits for the others."""
        if self.coordinator is None or self._rendezvous is None:
            return []
        end_liveness(self.coordinator)
        try:
            return self.coordinator.leave(patience if self._rendezvous.hosts_store else 0.0)
        except dist.DistError:
            # Who held the store has gone first; there is nobody left to sign off with.
            return []

    def _warn_of(self, late: list[int]) -> None:
        if late:
            ranks = ", ".join(map(str, late))
            logger.warning(
                "rank %d ends the store of the job, but rank(s) %s still use it.", self.rank, ranks
            )

    def _tell_failure(self, error: BaseException) -> None:
        coordinator = self.coordinator
        if coordinator is None:
            return
        teller = threading.Thread(
            target=self._tell, args=(coordinator, error), name="tell failure", daemon=True
        )
        teller.start()
        teller.join(_TELL_SECONDS)
        if teller.is_alive():
            logger.error("the other ranks could not be told: the store of the job does not answer.")

    def _tell(self, coordinator: Coordinator, error: BaseException) -> None:
        try:
            coordinator.fail(error)
            if not isinstance(error, RankFailedError):
                coordinator.raise_if_failed()
        except RankFailedError as first:
            logger.error("before that, %s", first)
        except dist.DistError:
            logger.error("the other ranks could not be told: the store of the job is gone.")
        # The others need a moment to read the note before its holder ends.
        self._sign_off(_FAREWELL_SECONDS)

    def __enter__(self) -> Self:
        return self if self.is_open else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if not ended_well and self.world_size > 1:
            logger.error("this rank failed with %s: %s", type(error).__name__, error)
        self._release(None if ended_well else error)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank}, local_rank={self.local_rank}, "
            f"world_size={self.world_size}, local_world_size={self.local_world_size}, "
            f"hostname={self.hostname!r}, master_addr={self.master_addr!r}, master_port={self.master_port}, "
            f"backend={self.backend!r}, device='{self.device}')"
        )


def _set_group_timeout(timeout: float) -> None:
    """Set the timeout of later collectives of the default group; warns where the backend cannot do that."""
    group = dist.group.WORLD
    if group is None:
        return
    try:
        group.set_timeout(timedelta(seconds=timeout))
    except RuntimeError as error:
        # The debug wrapper of torch 2.11 (TORCH_DISTRIBUTED_DEBUG=DETAIL), for one.
        logger.warning(
            "training_timeout=%g s cannot be set, so that collectives keep init_timeout: %s", timeout, error
        )


def _close_group() -> None:
    """Destroy the default group and every group made from it.

    Whatever still holds a group keeps the backend's threads alive, and gloo then aborts the interpreter on
    its way out. Reducers and hooks hold groups in reference cycles, so these are collected first, and DTensor
    keeps the meshes of its operators.
    """
    gc.collect()
    dist.destroy_process_group()
    forget_meshes()
    gc.collect()


def _abandon_group() -> None:
    """Let go of the default group while other ranks may never answer again.

    Destroying a gloo group waits for pending collectives, and thus for ranks that wait for this one. The
    backend objects are kept alive on purpose, so that this process can end at once with its own message;
    accelerator backends are told to abort instead.
    """
    group = dist.group.WORLD
    if group is None:
        return
    group.abort()
    for held in list(dist.distributed_c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    dist.destroy_process_group()
