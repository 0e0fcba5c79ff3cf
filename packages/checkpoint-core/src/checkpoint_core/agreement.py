"""Decisions that all ranks share: what one rank cannot do, every rank refuses, with the same message."""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NotRequired, TypedDict, TypeVar

import torch
import torch.distributed as dist

from checkpoint_core.encoding import EncodedState
from checkpoint_core.errors import CheckpointError, LeaseLostError, LostRankError, describe_error
from checkpoint_core.tensor_files import JsonSpec, TensorSpec, spec_of
from dist_env import (
    ControlGroup,
    DistributedEnvInterface,
    RankFailedError,
    RankTimeoutError,
    StaticDistributedEnvironment,
    barrier,
    may_pass,
)

_OPENING = "opening the checkpoint manager"
_CHUNK_BYTES = 64 * 1024 * 1024
_MOST_REPORT_BYTES = 1 << 30
_SILENT_SECONDS = 10.0
"""Without a sign of life for so long, the process of a rank that is waited for counts as lost. A launcher
that has seen it die gives the others half a minute."""
_T = TypeVar("_T")


class _Report(TypedDict, Generic[_T]):
    result: NotRequired[_T]
    error: str | None
    lost_lease: bool
    host: str
    may_pass: NotRequired[bool]


def default_environment() -> DistributedEnvInterface:
    """That of the default process group, or a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return StaticDistributedEnvironment()
    rank, size = dist.get_rank(), dist.get_world_size()
    return StaticDistributedEnvironment(
        rank=rank,
        world_size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )


class RankAgreement:
    """Runs steps on all ranks and lets none continue unless all succeeded.

    Messages travel as JSON over a gloo group of its own, which works beside any backend and has its own
    timeout. Constructing it is collective when there is more than one rank.

    Ranks that see one directory are a node: all of them, or with ``each_node`` those of one node of the job,
    which have consecutive numbers. The lowest rank of a node is its leader and does what is done once in its
    directory. Ranks that keep one copy of the state together are a site: those of a node, or with ``spread``
    all ranks, so that each node keeps its part of the only copy.

    Args:
        env: Rank and world size, and with ``each_node`` the local ones.
        timeout_seconds: How long to wait for the slowest rank.
        each_node: Whether every node has a directory of its own.
        spread: Whether all nodes together keep one copy.

    Raises:
        CheckpointError: More than one rank, but the default process group is missing or does not match; or
            the local ranks contradict the global ones.
    """

    def __init__(
        self,
        env: DistributedEnvInterface,
        timeout_seconds: float,
        *,
        each_node: bool = False,
        spread: bool = False,
    ) -> None:
        self.rank = env.rank
        self.world_size = env.world_size
        self._node_size = env.local_world_size if each_node else env.world_size
        begin = env.rank - env.local_rank if each_node else 0
        self.node = range(begin, begin + self._node_size)
        self.is_spread = spread and self._node_size < env.world_size
        self.site = range(env.world_size) if self.is_spread else self.node
        self.threads = max(1, min(4, (os.cpu_count() or 1) // max(env.local_world_size, 1)))
        self._env = env
        self._timeout_seconds = timeout_seconds
        self._broken: str | None = None
        self._group: ControlGroup | None = None
        if self.world_size > 1:
            _check_default_group(self.rank, self.world_size)
            self._default = dist.group.WORLD
            try:
                self._group = ControlGroup(range(self.world_size), timeout_seconds, doing=_OPENING)
            except RankFailedError as error:
                raise LostRankError(str(error)) from error
        if each_node:
            self._check_nodes()

    def _check_nodes(self) -> None:
        # Together, because one rank alone may see nothing wrong, and would wait for the others.
        env = self._env
        local = self.run(_OPENING, lambda: [env.local_rank, env.local_world_size])
        size = local[0][1]
        for rank, (local_rank, local_size) in enumerate(local):
            if local_size != size or local_rank != rank % size or self.world_size % size:
                self.close()
                raise CheckpointError(
                    "save_on_each_node=True needs nodes with equal numbers of consecutive ranks, but rank "
                    f"{rank} is local rank {local_rank} of {local_size}, and rank 0 is local rank "
                    f"{local[0][0]} of {size}, among {self.world_size} ranks. Use as many ranks on every "
                    "node, or storage that all nodes share."
                )

    @property
    def leader(self) -> int:
        """The lowest rank of this rank's node."""
        return self.node.start

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader of its node."""
        return self.rank == self.leader

    @property
    def broken(self) -> bool:
        """Whether a rank was lost, so that the ranks can no longer agree on anything."""
        return self._broken is not None

    def nodes(self) -> list[range]:
        """The ranks of every node."""
        starts = range(0, self.world_size, self._node_size)
        return [range(start, start + self._node_size) for start in starts]

    def sites(self) -> list[range]:
        """The ranks of every site."""
        return [self.site] if self.is_spread else self.nodes()

    def close(self) -> None:
        """Close the connections. Later calls with more than one rank fail."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def run(self, phase: str, action: Callable[[], _T]) -> list[_T]:
        """Run one step on every rank. Collective.

        Args:
            phase: What the step does, for messages, such as ``saving checkpoint-10``.
            action: The step. Its result travels as JSON: dict with text keys, list, str, int, float, bool
                and None.

        Returns:
            The results of all ranks, by rank. Those of ranks that say the same are one object, which nobody
            may change: parsed for each of thousands of ranks, a table of a large model would fill the memory,
            and a word from each take as long as all else.

        Raises:
            CheckpointError: On every rank, with the same message, when the step failed on any; or when a rank
                did not arrive within the timeout. A LeaseLostError, if one was raised on any.
        """
        report: _Report[_T] = {"error": None, "lost_lease": False, "host": ""}
        failure: BaseException | None = None
        try:
            report["result"] = action()
        except BaseException as error:  # noqa: BLE001 - the other ranks must learn of any failure
            failure = error
            report["error"] = describe_error(error)
            report["lost_lease"] = isinstance(error, LeaseLostError)
            # Only here: reports that say the same travel as one, whoever they are of.
            report["host"] = socket.gethostname()
            report["may_pass"] = may_pass(error)
        reports = [report]
        if self.world_size > 1:
            texts = self._exchange(phase, report, failure)
            parsed: dict[str, _Report[_T]] = {text: json.loads(text) for text in set(texts)}
            reports = [parsed[text] for text in texts]
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # Ctrl-C stays Ctrl-C where it was pressed.
        failed = {rank: report for rank, report in enumerate(reports) if report["error"] is not None}
        if failed:
            # A lost lease keeps its name, as a lost rank does: nothing is wrong with what was to be saved.
            kind = LeaseLostError if any(each["lost_lease"] for each in failed.values()) else CheckpointError
            found = kind(_summary(phase, failed, self.world_size))
            found.may_pass = any(each.get("may_pass", False) for each in failed.values())
            raise found from failure
        return [report["result"] for report in reports]

    def run_on_main(self, phase: str, action: Callable[[], _T], main: int = 0) -> _T:
        """Run one step on one rank and give every rank its result. Collective.

        Args:
            phase: What the step does, for messages.
            action: The step, called on one rank only; its result travels as JSON.
            main: That rank.

        Returns:
            Its result.

        Raises:
            CheckpointError: As :meth:`run`.
        """
        text = bytearray()

        def act() -> int:
            if self.rank == main:
                text.extend(json.dumps(action()).encode())
            return len(text)

        size = self.run(phase, act)[main]
        if self.rank != main:
            text.extend(bytes(size))
        # Only the length is gathered: what all ranks receive from all would be the result times their number.
        self.broadcast(phase, torch.frombuffer(text, dtype=torch.uint8), main)
        result: _T = json.loads(text)
        return result

    def run_on_leaders(self, phase: str, action: Callable[[], _T]) -> _T:
        """Run one step on the leader of every node and give its ranks the result. Collective.

        Args:
            phase: What the step does, for messages.
            action: The step, called on leaders only; its result travels as JSON.

        Returns:
            The result of this rank's leader.

        Raises:
            CheckpointError: As :meth:`run`.
        """
        return self.run(phase, lambda: [action()] if self.is_leader else [])[self.leader][0]

    def share(self, phase: str, states: Sequence[EncodedState]) -> Sequence[EncodedState]:
        """Hand encoded states from rank 0 to every rank. Collective.

        Args:
            phase: What is shared, for messages.
            states: The states; only rank 0's are used.

        Returns:
            Rank 0's states, with CPU tensors.

        Raises:
            CheckpointError: A rank failed or did not arrive within the timeout.
        """
        outlines = self.run_on_main(phase, lambda: [_outline(each) for each in states])
        received: list[EncodedState] = []

        def take() -> None:
            for document, specs in outlines if self.rank else ():
                tensors = {name: TensorSpec.from_json(spec).empty() for name, spec in specs.items()}
                received.append(EncodedState(document, tensors))
            received.extend(states if self.rank == 0 else ())

        # Together: a rank without memory for it would otherwise leave the others waiting in the broadcast.
        self.run(phase, take)
        tensors = [each.tensors[name] for each in received for name in sorted(each.tensors)]
        for batch in _batches(tensors):
            self._broadcast_batch(phase, batch)
        return received

    def _broadcast_batch(self, phase: str, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast contiguous CPU tensors from rank 0 in one message; a message each takes a millisecond."""
        if len(tensors) == 1:
            self.broadcast(phase, tensors[0], 0)
            return
        pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        packed = torch.cat(pieces)
        self.broadcast(phase, packed, 0)
        if self.rank != 0:
            received = torch.split(packed, [len(piece) for piece in pieces])
            for piece, values in zip(pieces, received, strict=True):
                piece.copy_(values)

    def broadcast(self, phase: str, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor on every rank with the values of one rank. Collective.

        Args:
            phase: What is shared, for messages.
            tensor: A contiguous CPU tensor, of the same dtype and shape on every rank; overwritten on all
                but ``source``.
            source: The rank whose values are sent.

        Raises:
            CheckpointError: A rank did not arrive within the timeout.
        """
        if self.world_size == 1 or not tensor.numel():
            return
        group = self._opened(phase)
        try:
            for piece in torch.split(tensor.reshape(-1).view(torch.uint8), _CHUNK_BYTES):
                group.wait(phase, self._start_broadcast(phase, group, piece, source))
        except RankFailedError as error:
            raise self._lost(phase, error) from error
        except BaseException as error:
            raise self._torn(phase, error) from error

    def exchange(
        self, phase: str, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        """Send tensors to some ranks, and receive from others. Collective: what one sends, another receives.

        Args:
            phase: What is exchanged, for messages.
            sends: Contiguous CPU tensors of bytes, by the rank that gets them.
            receives: Memory for what comes, by the rank that sends it.

        Raises:
            CheckpointError: A rank did not arrive within the timeout.
        """
        if not sends and not receives:
            return
        group = self._opened(phase)
        # Of a ControlGroup of all ranks, the process group numbers them as the job does.
        connections = group.process_group
        try:
            if connections is None:
                raise group.broken(phase, "the connections are closed")
            group.connect(phase, {*sends, *receives})
            try:
                works = [connections.recv([data], rank, 0) for rank, data in sorted(receives.items())]
                works += [connections.send([data], rank, 0) for rank, data in sorted(sends.items())]
                # Not polled, as other exchanges are: a gloo transfer completes only in wait().
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise group.broken(phase, error) from error
        except RankFailedError as error:
            raise self._lost(phase, error) from error
        except BaseException as error:
            raise self._torn(phase, error) from error

    def _start_broadcast(
        self, phase: str, group: ControlGroup, piece: torch.Tensor, source: int
    ) -> dist.Work:
        try:
            return group.broadcast(piece, source)
        except RuntimeError as error:  # a connection that is broken already
            raise group.broken(phase, error) from error

    def _exchange(self, phase: str, report: _Report[_T], failure: BaseException | None) -> list[str]:
        """The reports of all ranks, as text."""
        group = self._opened(phase, failure)
        try:
            # The barrier knows which ranks are missing; the gather behind it would only hang.
            barrier(
                self._env,
                timeout=self._timeout_seconds,
                process_group=group,
                tag=phase,
                lost_after=_SILENT_SECONDS,
            )
            return group.gather(phase, json.dumps(report), most_bytes=_MOST_REPORT_BYTES)
        except (RankFailedError, RankTimeoutError) as error:
            raise self._lost(phase, error) from (failure or error)
        except BaseException as error:  # noqa: BLE001 - raised as what it is, or as a CheckpointError
            raise self._torn(phase, error) from (failure or error)

    def _opened(self, phase: str, failure: BaseException | None = None) -> ControlGroup:
        if self._group is None or self._broken:
            raise CheckpointError(
                f"{phase}: the ranks can no longer agree ({self._broken or 'the manager was closed'}). "
                "Restart the job, which resumes from the last committed checkpoint."
            ) from failure
        if not dist.is_initialized() or dist.group.WORLD is not self._default:
            # Ranks of another group may be others, or have other numbers.
            raise CheckpointError(
                f"{phase}: the process group that the manager was made in was destroyed. Close the manager "
                "before the process group is destroyed."
            ) from failure
        return self._group

    def _lost(self, phase: str, error: RankFailedError | RankTimeoutError) -> LostRankError:
        if isinstance(error, RankTimeoutError):
            names = [f"rank {rank} ({host})" for rank, host in sorted(error.missing.items())]
            more = f" and {len(names) - 16:,} more" if len(names) > 16 else ""
            reason = f"no answer within {self._timeout_seconds:g} s from {', '.join(names[:16])}{more}"
            advice = (
                ". Look at the log of that rank. If it is only slow, raise CheckpointConfig.timeout_seconds"
            )
        else:  # says itself what to do
            reason, advice = " ".join(str(error).split()).removeprefix(f"{phase}: ").removesuffix("."), ""
        self._broken = f"{phase}: {reason}"
        return LostRankError(f"{phase}: {reason}{advice}.")

    def _torn(self, phase: str, error: BaseException) -> BaseException:
        """What to raise after Ctrl-C in a collective, or when the process group was destroyed meanwhile.

        From here on, messages of different steps would meet, so nothing more is agreed on.
        """
        self._broken = f"{phase}: interrupted by {describe_error(error).removesuffix('.')}"
        if not isinstance(error, Exception):
            return error  # Ctrl-C stays Ctrl-C where it was pressed.
        reason = describe_error(error).removesuffix(".")
        return CheckpointError(f"{phase}: {reason}. Close the manager before the process group is destroyed.")


def _check_default_group(rank: int, world_size: int) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise CheckpointError(
            f"dist.world_size is {world_size}, but there is no process group. Open the distributed "
            "environment before making a CheckpointManager."
        )
    actual = (dist.get_rank(), dist.get_world_size())
    if actual != (rank, world_size):
        raise CheckpointError(
            f"dist says rank {rank} of {world_size}, but the process group says rank {actual[0]} of "
            f"{actual[1]}. Pass the environment that opened the group."
        )


def _summary(phase: str, failed: Mapping[int, _Report[_T]], world_size: int) -> str:
    if world_size == 1:
        return f"{phase}: {failed[0]['error']}"
    # Ranks often fail for the same reason; say it once.
    by_error: dict[object, list[str]] = {}
    for rank, report in failed.items():
        by_error.setdefault(report["error"], []).append(f"{rank} ({report['host']})")
    reasons = [f"rank {', '.join(ranks)}: {error}" for error, ranks in by_error.items()]
    return f"{phase}: {' '.join(reasons)}"


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors with values, of :data:`_CHUNK_BYTES` together; a larger one is by itself."""
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        if batch and size + tensor.nbytes > _CHUNK_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch


def _outline(state: EncodedState) -> tuple[object, dict[str, JsonSpec]]:
    return state.document, {name: spec_of(tensor).to_json() for name, tensor in state.tensors.items()}
