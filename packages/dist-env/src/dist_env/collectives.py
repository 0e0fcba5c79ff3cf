"""Meeting points and object exchange of the ranks of an environment.

Every function is a no-op for one process, so that callers need no case for it; and for one whose other ranks
do not exist (`fake_job`), as if these had the same to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from dist_env.control_group import ControlGroup
from dist_env.coordination import coordinator_of, no_process_group
from dist_env.encoding import decode_as, encode_value
from dist_env.environment import DistributedEnvironment
from dist_env.errors import DistributedEnvironmentError, RankFailedError
from dist_env.interface import DistributedEnvInterface, is_alone
from dist_env.liveness import LostRankWatch, liveness_of

T = TypeVar("T")

_DEFAULT_TIMEOUT = 1800.0
_UNFIT = -1
"""In place of a size: the rank has a value that cannot be sent."""


def barrier(
    env: DistributedEnvInterface,
    *,
    timeout: float | None = None,
    process_group: dist.ProcessGroup | ControlGroup | None = None,
    tag: str = "",
    lost_after: float | None = None,
) -> None:
    """Wait until every rank has arrived; on a timeout say who has not.

    Goes through the store, not through the collective backend: the host waits, queued device work does not.

    Args:
        env: Environment of this process.
        timeout: Seconds to wait; None takes the environment's `training_timeout`.
        process_group: Ranks to wait for; None means all.
        tag: What is waited for; appears in the message.
        lost_after: With a long timeout, for ranks that may be killed: from the first call with it on, a
            thread of each rank answers for its process, as under `naming_lost_ranks`, and one that has
            answered before and is silent for so many seconds ends the wait. None: only the timeout counts.

    Raises:
        RankTimeoutError: Names the missing ranks and their hosts.
        RankFailedError: A rank left its environment with an error, which is carried; or it is lost.
        DistributedEnvironmentError: There are several ranks but no process group.
    """
    if is_alone(env):
        return
    ranks, scope = _members(env, process_group)
    _check_seconds(timeout)
    _check_seconds(lost_after, "lost_after")
    coordinator, look = coordinator_of(env), None
    if lost_after is not None:
        look = LostRankWatch(liveness_of(coordinator), lost_after).look
    coordinator.barrier(ranks, scope, _seconds(env, timeout), tag, look)


@contextmanager
def main_process_first(
    env: DistributedEnvInterface, *, local: bool = False, timeout: float | None = None
) -> Iterator[bool]:
    """Run the body on rank 0 first and on the other ranks after it, for example to fill a cache once.

    Args:
        env: Environment of this process.
        local: First on local rank 0 of each host, for what every host needs.
        timeout: Seconds that the others wait; None takes the environment's `training_timeout`.

    Yields:
        Whether this process is one that goes first.

    Raises:
        RankTimeoutError: The main process did not finish the body in time.
        RankFailedError: The main process raised inside the body; carries its error.
    """
    size = env.local_world_size if local else env.world_size
    if size == 1 or is_alone(env):
        yield True
        return
    _check_seconds(timeout)
    coordinator = coordinator_of(env)
    scope = f"first/{coordinator.record.host}" if local else "first"
    key = f"{scope}/{coordinator.next_call(scope)}"
    is_main = (env.local_rank if local else env.rank) == 0
    if not is_main:
        main = env.rank - env.local_rank if local else 0
        coordinator.await_outcome(key, main, _seconds(env, timeout), readers=size - 1)
        yield False
        return
    try:
        yield True
    except BaseException as error:
        coordinator.announce(key, error)
        raise
    coordinator.announce(key, None)


# torch's own object collectives unpickle, and need numpy in some releases that this package supports (2.11).


def broadcast_object(
    obj: T, env: DistributedEnvInterface, src: int = 0, *, process_group: dist.ProcessGroup | None = None
) -> T:
    """Give every rank the object of rank `src`.

    Args:
        obj: What `encode_value` takes: JSON values, bytes, dense tensors, tuples and more; only that of `src`
            counts. No code of another rank is run.
        env: Environment of this process.
        src: Global rank of the sender.
        process_group: Ranks that take part; None means all.

    Returns:
        On `src` the object itself, elsewhere an equal one, with tensors detached and on the CPU.

    Raises:
        TypeError: The object has a value of another type; says where. On every rank.
        RankFailedError: What came from `src` cannot be read.
        DistributedEnvironmentError: `src` is not one of the ranks, or there is no process group.
    """
    if is_alone(env):
        _check_source(src, list(range(env.world_size)))
        return obj
    _check_source(src, _members(env, process_group)[0])
    device = _device_for(process_group, env.device)
    is_source = dist.get_rank() == src
    data, problem = _encoded(obj) if is_source else (b"", None)
    size = torch.tensor([_UNFIT if problem else len(data)], device=device)
    dist.broadcast(size, src=src, group=process_group)
    _raise_unfit([int(size.item())], [src], problem)
    on_device = _zeros(int(size.item()), src, device)
    if is_source:
        on_device.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(on_device, src=src, group=process_group)
    return obj if is_source else _decoded(obj, _to_bytes(on_device), src)


def gather_objects(
    obj: T, env: DistributedEnvInterface, *, process_group: dist.ProcessGroup | None = None
) -> list[T]:
    """Give every rank the objects of all ranks, in the order of the ranks.

    Args:
        obj: What `encode_value` takes: JSON values, bytes, dense tensors, tuples and more. No code of another
            rank is run.
        env: Environment of this process.
        process_group: Ranks that take part; None means all.

    Returns:
        One object per rank, with tensors detached and on the CPU.

    Raises:
        TypeError: The object of some rank has a value of another type. On every rank.
        RankFailedError: What came from some rank cannot be read.
        DistributedEnvironmentError: There are several ranks but no process group.
    """
    if is_alone(env):
        return [obj] * env.world_size
    ranks, _ = _members(env, process_group)
    device = _device_for(process_group, env.device)
    data, problem = _encoded(obj)
    own = torch.tensor([_UNFIT if problem else len(data)], device=device)
    sizes = [torch.zeros_like(own) for _ in ranks]
    dist.all_gather(sizes, own, group=process_group)
    lengths = [int(size.item()) for size in sizes]
    _raise_unfit(lengths, ranks, problem)
    longest = max(lengths)
    # Ranks must send equally long tensors.
    padded = _zeros(longest, ranks[lengths.index(longest)], device)
    padded[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    received = [_zeros(longest, rank, device) for rank in ranks]
    dist.all_gather(received, padded, group=process_group)
    parts = zip(received, lengths, ranks, strict=True)
    return [_decoded(obj, _to_bytes(tensor[:length]), rank) for tensor, length, rank in parts]


def _members(
    env: DistributedEnvInterface, process_group: dist.ProcessGroup | ControlGroup | None
) -> tuple[list[int], str]:
    """Global ranks of a group, and a name for it that is the same on each of them."""
    if isinstance(process_group, ControlGroup):
        return list(process_group.ranks), process_group.scope
    if not (dist.is_available() and dist.is_initialized()):
        raise no_process_group(env)
    if process_group is None:
        return list(range(env.world_size)), "world"
    if dist.get_rank(process_group) < 0:
        raise DistributedEnvironmentError(f"process_group does not contain this rank, {env.rank}.")
    return dist.get_process_group_ranks(process_group), f"group {process_group.group_name}"


def _check_source(src: int, ranks: list[int]) -> None:
    if src not in ranks:
        raise DistributedEnvironmentError(f"src={src} is not one of the ranks that take part: {ranks}.")


def _check_seconds(seconds: float | None, name: str = "timeout") -> None:
    if seconds is not None and not seconds > 0:
        raise DistributedEnvironmentError(f"{name}={seconds!r} is not a positive number of seconds.")


def training_timeout(env: DistributedEnvInterface) -> float:
    """How long to wait for other ranks while nothing else is said, in seconds."""
    return env.training_timeout if isinstance(env, DistributedEnvironment) else _DEFAULT_TIMEOUT


def _seconds(env: DistributedEnvInterface, timeout: float | None) -> float:
    return training_timeout(env) if timeout is None else timeout


def _encoded(obj: object) -> tuple[bytes, TypeError | None]:
    try:
        return encode_value(obj, name="the object"), None
    except TypeError as error:
        # Raised when the others know, who would wait for this rank.
        return b"", error


def _decoded(like: T, data: bytes, rank: int) -> T:
    try:
        return decode_as(like, data)
    except ValueError as error:
        raise _unreadable(rank, error) from error


def _raise_unfit(sizes: Sequence[int], ranks: Sequence[int], own: TypeError | None) -> None:
    if own is not None:
        raise own
    for size, rank in zip(sizes, ranks, strict=True):
        if size == _UNFIT:
            raise TypeError(
                f"the object of rank {rank} cannot be sent to other ranks. Its own error says why."
            )
        if size <= 0:
            raise _unreadable(rank, f"it is said to have {size} bytes")


def _unreadable(rank: int, reason: object) -> RankFailedError:
    return RankFailedError(
        f"exchanging objects: rank {rank} sent a message that cannot be read: {reason}. Run the same "
        "releases on all ranks, import the same modules, and let nobody else reach their network.",
        rank,
    )


def _zeros(size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Memory for a message of a size that a rank has told."""
    try:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise _unreadable(rank, error) from error


def _to_bytes(tensor: torch.Tensor) -> bytes:
    buffer = bytearray(tensor.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(tensor)
    return bytes(buffer)


def _device_for(group: dist.ProcessGroup | None, own_device: torch.device) -> torch.device:
    """A device that the group can carry."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if own_device.type != "cpu" or accelerator is None:
        return own_device
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
