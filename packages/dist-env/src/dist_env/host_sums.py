"""Sums of a few numbers over all ranks, from host to host.

A collective backend moves large tensors; for a few bytes its threads and handshakes cost far more than the
message. Loops that agree on something in every step pay that in every step.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence

from dist_env.collectives import training_timeout
from dist_env.coordination import Coordinator, coordinator_of
from dist_env.errors import DistributedEnvironmentError
from dist_env.interface import DistributedEnvInterface
from dist_env.links import Link, accept, connect, listen

_FAN_OUT = 16
"""Ranks that report to one. Each costs it a few microseconds; each floor of the tree costs a round trip."""


class HostSums:
    """Sums of a few numbers over all ranks of a job, in host memory.

    The ranks form a tree of TCP connections, 16 below each. Numbers go up, added in a fixed order, and the
    sums come down, so that all ranks get the same bits. The host waits for the other hosts; no device is
    involved. Making it is collective. With one rank nothing is opened.

    Args:
        env: Environment of this process.
        timeout: Seconds to wait for another rank; None takes the environment's `training_timeout`.

    Raises:
        DistributedEnvironmentError: `timeout` is not positive, or there is no process group.
        RankTimeoutError, torch.distributed.DistNetworkError: A rank does not come, or cannot be reached.
        RankFailedError: A rank failed.
    """

    def __init__(self, env: DistributedEnvInterface, *, timeout: float | None = None) -> None:
        if timeout is not None and not timeout > 0:
            raise DistributedEnvironmentError(f"timeout={timeout!r} is not a positive number of seconds.")
        self._above: Link | None = None
        self._below: list[Link] = []
        self._number = 0
        if env.world_size > 1:
            seconds = training_timeout(env) if timeout is None else timeout
            self._open(env, coordinator_of(env), seconds)
        links = [*self._below, *([self._above] if self._above else [])]
        self._end = weakref.finalize(self, _close, links)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Add up numbers over the ranks; collective.

        Args:
            numbers: At least one, as many on every rank. Whole numbers up to 2**53 are added exactly.

        Returns:
            The sums, as float64, the same on all ranks.

        Raises:
            torch.distributed.DistNetworkError: A connection broke, or nothing came in time. It names the
                other end, which need not be the rank at fault: see `naming_lost_ranks`.
            RuntimeError: The ranks do not do the same thing.
        """
        self._number += 1
        totals = [float(number) for number in numbers]
        for link in self._below:
            theirs = link.receive(self._number, len(totals))
            totals = [a + b for a, b in zip(totals, theirs, strict=True)]
        if self._above is not None:
            self._above.send(self._number, totals)
            totals = list(self._above.receive(self._number, len(totals)))
        for link in self._below:
            link.send(self._number, totals)
        return totals

    def close(self) -> None:
        """Close the connections of this rank. Happens by itself when nobody holds this any more."""
        self._end()

    def _open(self, env: DistributedEnvInterface, coordinator: Coordinator, seconds: float) -> None:
        key = f"host sums/{coordinator.next_call('host sums')}"
        above = (env.rank - 1) // _FAN_OUT if env.rank else None
        first = env.rank * _FAN_OUT + 1
        below = range(first, min(first + _FAN_OUT, env.world_size))
        if below:
            secret = secrets.token_bytes(16)
            with listen() as (listener, address):
                coordinator.store.set(f"{key}/{env.rank}", f"{address} {secret.hex()}")
                hosts = {rank: coordinator.host_of(rank) for rank in below}
                self._below = accept(listener, secret, hosts, seconds, coordinator.raise_if_failed)
        if above is not None:
            told = coordinator.wait_for(f"{key}/{above}", above, seconds, "connecting the ranks")
            address, secret_hex = told.decode().split(" ")
            name = f"rank {above} on {coordinator.host_of(above)}"
            self._above = connect(address, bytes.fromhex(secret_hex), env.rank, name, seconds)


def _close(links: Sequence[Link]) -> None:
    for link in links:
        link.close()
