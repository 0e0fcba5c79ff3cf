"""From the error of a broken collective to one that names the lost rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dist_env.collectives import coordinator_of
from dist_env.errors import DistributedEnvironmentError, RankFailedError, one_line
from dist_env.interface import DistributedEnvInterface, is_alone
from dist_env.roll_call import roll_call_of

# What the errors of gloo begin with: they come as plain RuntimeError, the type that models raise as well.
# `[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer` is usual; the second
# has no file; the others are those of torch's own wrapping of gloo, the last with TORCH_DISTRIBUTED_DEBUG.
_GLOO_ERROR = re.compile(
    r"\[(enforce fail at )?[^\]\s]*\bgloo/[^\]\s]+\.(cc|h):\d+\]"
    r"|Application timeout caused pair closure"
    r"|Gloo connectFullMesh failed with "
    r"|\[Rank \d+\]: (Rank \d+ failed to pass|Ranks .* failed to pass|.*timed out in) monitoredBarrier"
    r"|ProcessGroupWrapper: Monitored Barrier encountered error"
)


@contextmanager
def naming_lost_ranks(
    env: DistributedEnvInterface, doing: str | Callable[[], str], *, seconds: float = 5.0
) -> Iterator[None]:
    """Turn the error of a collective that breaks in the body into one that names the lost rank.

    A broken collective, a DDP backward pass included, says at most which address closed a connection. After
    such an error the ranks that are left hold a roll call through the job's store. From its first use on, a
    thread of each rank answers for the process, also while that computes or waits: a rank that is merely
    slow is not called lost. With one rank nothing is done.

    Recognised are the errors of `torch.distributed` (`DistError` and its subclasses) and the plain
    `RuntimeError` of gloo, by its text. All other errors pass unchanged.

    Args:
        env: Environment of this process.
        doing: What the body does, for the message; if callable, asked when it is needed.
        seconds: How long to wait for the answers of the other ranks.

    Raises:
        RankFailedError: From the error of the collective. It names the rank that is lost, that failed with an
            error of its own, that left early, or that was not heard; with its host. If every rank answers it
            says so, with the error of the collective.
        DistributedEnvironmentError: `seconds` is not positive, or there is no process group.
    """
    if not seconds > 0:
        raise DistributedEnvironmentError(f"seconds={seconds!r} is not a positive number of seconds.")
    if is_alone(env):
        yield
        return
    roll_call = roll_call_of(coordinator_of(env))
    try:
        yield
    except RuntimeError as error:
        if not is_broken_collective(error):
            raise
        verdict = roll_call.hold(seconds)
        what = doing() if callable(doing) else doing
        if verdict is not None:
            raise RankFailedError(f"{what}: {verdict.text.removesuffix('.')}.", verdict.rank) from error
        raise RankFailedError(
            f"{what}: a collective failed, though every rank answers: {one_line(error)}. If it timed out, a "
            "rank was only late, and a longer timeout helps; if not, look at the network between the hosts.",
            None,
        ) from error


def is_broken_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised the error because a collective or the store broke."""
    if isinstance(error, dist.DistError):
        return True
    # The type is compared exactly: RankFailedError and the out-of-memory error are subclasses.
    return type(error) is RuntimeError and _GLOO_ERROR.match(str(error)) is not None
