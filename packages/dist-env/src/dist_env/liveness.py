"""Which ranks are still there? Asked over the store, after a collective broke.

gloo tells a broken connection only to the ranks that talk to the dead one, and only by its address. So every
rank has a thread that answers for its process, whatever the main thread is waiting for or computing.
"""

from __future__ import annotations

import atexit
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

from torch import distributed as dist

from dist_env.coordination import Coordinator, coordinator_of
from dist_env.errors import DistributedEnvironmentError, RankFailedError, listed, one_line
from dist_env.interface import DistributedEnvInterface, is_alone

# How often a rank looks whether it is asked: an answer comes this late, at most.
_LISTEN_SECONDS = 0.5
_LOOK_SECONDS = 0.05
# What a store that works may take on top of the check itself.
_GRACE_SECONDS = 2.0
# Before this nobody is asked in a wait: most are over by then.
_QUIET_SECONDS = 5.0
_JOIN_SECONDS = 5.0

_State = Literal["here", "left", "silent", "unheard"]
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
    such an error the ranks that are left ask through the job's store who is there. From its first use on, a
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
    liveness = liveness_of(coordinator_of(env))
    try:
        yield
    except RuntimeError as error:
        if not is_broken_collective(error):
            raise
        verdict = liveness.check(seconds)
        what = doing() if callable(doing) else doing
        if verdict is not None:
            raise RankFailedError(f"{what}: {verdict.text.removesuffix('.')}.", verdict.rank) from error
        raise RankFailedError(
            f"{what}: a collective failed, though every rank answers: {one_line(error)}. If it timed out, a "
            "rank was only late, and a longer timeout helps. If not, look at the network between the hosts.",
            None,
        ) from error


def is_broken_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised the error because a collective or the store broke."""
    if isinstance(error, dist.DistError):
        return True
    # The type is compared exactly: RankFailedError and the out-of-memory error are subclasses.
    return type(error) is RuntimeError and _GLOO_ERROR.match(str(error)) is not None


@dataclass(frozen=True)
class Verdict:
    """What a liveness check found.

    Attributes:
        text: What is known of the rank or ranks, to stand behind what the job was doing.
        rank: The global rank that the text names first; None if it names none.
    """

    text: str
    rank: int | None


class Liveness:
    """A thread that answers the liveness checks of other ranks, and makes one when asked.

    Args:
        coordinator: Coordinator of the job; the thread makes a connection of its own from it.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._shared = coordinator
        self._rank = coordinator.record.rank
        self._holder = coordinator.holder
        self._holder_host = coordinator.host_of(self._holder) if self._holder is not None else ""
        self._answered = -1
        self._known: Verdict | None = None
        self._missing: list[str] = []
        self._ends = False
        self._begun = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._requests: queue.SimpleQueue[tuple[float, Future[Verdict | None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="liveness", daemon=True)
        self._thread.start()
        # A rank that dies before its first answer counts as busy until the timeout of the job, not as lost.
        self._begun.wait(_JOIN_SECONDS)

    @property
    def known(self) -> Verdict | None:
        """The rank that is known to be lost or to have failed, whoever found that out."""
        return self._known

    def start_check(self, seconds: float) -> None:
        """Like `check`, but wait for nothing: `known` tells what comes of it."""
        self._requests.put((seconds, Future()))

    def check(self, seconds: float) -> Verdict | None:
        """Ask every rank whether it is there; takes little more than `seconds`, even if the store is gone.

        Args:
            seconds: How long to wait for answers.

        Returns:
            The rank that is lost, failed, left, or was not heard, or what became of the store; None if every
            rank answers.
        """
        with self._one_at_a_time:
            future: Future[Verdict | None] = Future()
            self._requests.put((seconds, future))
            end = time.monotonic() + seconds + _GRACE_SECONDS
            while time.monotonic() < end:
                try:
                    return future.result(_LOOK_SECONDS)
                except TimeoutError:
                    if not self._thread.is_alive() and not future.done():
                        return self._known or self._without_store("is gone", "has ended")
            return self._known or self._without_store(
                f"did not answer within {seconds:g} s", "is frozen or cut off from the network"
            )

    def stop(self) -> None:
        """End the thread, also amid a check for which nobody waits."""
        self._ends = True
        self._requests.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        try:
            # Opening the connection may wait long for a store that is gone; the main thread does not.
            self._coordinator = self._shared.clone()
            while True:
                self._listen()
                self._begun.set()
                try:
                    request = self._requests.get(timeout=_LISTEN_SECONDS)
                except queue.Empty:
                    continue
                if request is None:
                    return
                seconds, future = request
                future.set_result(self._ask(seconds))
        except dist.DistError:
            # Whoever asks sees that the thread has ended, and says so.
            return
        finally:
            self._begun.set()

    def _listen(self) -> None:
        """Answer the latest check, and learn what others found out, while the store is there to tell it."""
        store = self._coordinator.store
        called = store.add("liveness/asked", 0)
        if called > self._answered:
            store.set(f"liveness/answer/{self._rank}", str(called))
            self._answered = called
        if self._known is None:
            self._known = self._read()

    def _read(self) -> Verdict | None:
        store = self._coordinator.store
        if store.check(["liveness/verdict"]):
            return Verdict(**json.loads(store.get("liveness/verdict")))
        failure = self._coordinator.failure_of_another()
        return None if failure is None else Verdict(str(failure), failure.rank)

    def _ask(self, seconds: float) -> Verdict | None:
        number = self._coordinator.store.add("liveness/asked", 1)
        end = time.monotonic() + seconds
        states: dict[int, _State] = {
            rank: "unheard" for rank in range(self._coordinator.world_size) if rank != self._rank
        }
        while True:
            self._listen()
            if self._known is not None or self._ends:
                return self._known
            waiting = [rank for rank, state in states.items() if state not in ("here", "left")]
            states.update((rank, self._state(rank, number)) for rank in waiting)
            self._missing = [self._name(rank) for rank in waiting]
            if not waiting or time.monotonic() >= end:
                return self._judge(states, seconds)
            time.sleep(_LOOK_SECONDS)

    def _state(self, rank: int, number: int) -> _State:
        store = self._coordinator.store
        key = f"liveness/answer/{rank}"
        if store.check([f"left/{rank}"]):
            return "left"
        if not store.check([key]):
            return "unheard"
        return "here" if int(store.get(key)) >= number else "silent"

    def _judge(self, states: dict[int, _State], seconds: float) -> Verdict | None:
        """The sentence on the ranks that are not there, those that are known to be lost first."""
        by_state: dict[_State, list[int]] = {"silent": [], "left": [], "unheard": []}
        for rank, state in states.items():
            if state != "here":
                by_state[state].append(rank)
        sentences = [self._sentence(state, ranks, seconds) for state, ranks in by_state.items() if ranks]
        if not sentences:
            return None
        verdict = Verdict("; ".join(sentences), next(rank for ranks in by_state.values() for rank in ranks))
        if by_state["silent"]:
            # For the ranks that learn of it only when this one is gone, and the store with it.
            self._coordinator.store.set("liveness/verdict", json.dumps(asdict(verdict)))
        return verdict

    def _sentence(self, state: _State, ranks: list[int], seconds: float) -> str:
        named = listed(map(self._name, ranks))
        one = len(ranks) == 1
        if state == "silent":
            return (
                f"{named} {'is' if one else 'are'} lost: no answer from {'its process' if one else 'them'} "
                f"for {seconds:g} s (ended, frozen or cut off); look at {'its log' if one else 'their logs'}"
            )
        if state == "left":
            return (
                f"{named} {'has' if one else 'have'} left the job in good order while other ranks still wait "
                "for a collective; let every rank take part in the same collectives"
            )
        return (
            f"{named} {'was' if one else 'were'} not heard in a liveness check of {seconds:g} s and may be "
            "lost, or only busy: no answer is expected before a rank first comes to naming_lost_ranks; look "
            f"at {'its log' if one else 'their logs'}"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._coordinator.host_of(rank)}"

    def _without_store(self, became: str, process: str) -> Verdict:
        """What can be said without a store to ask."""
        until = f"; until then {', '.join(self._missing)} had not answered" if self._missing else ""
        if self._holder is None:
            return Verdict(
                f"the store of the job {became}, so nobody can be asked: the process that holds it (rank 0, "
                f"or the launcher) {process}{until}; look at its log",
                None,
            )
        return Verdict(
            f"rank {self._holder} on {self._holder_host} is lost: it held the store of the job, which "
            f"{became}, so its process {process}{until}; look at its log",
            self._holder,
        )


class LostRankWatch:
    """Makes liveness checks during a wait that may last, and ends it when a rank is lost.

    Args:
        liveness: That of this process.
        seconds: How long a process that has answered before may be silent.
    """

    def __init__(self, liveness: Liveness, seconds: float) -> None:
        self._liveness = liveness
        self._seconds = seconds
        self._next = time.monotonic() + _QUIET_SECONDS

    def look(self) -> None:
        """Look what is known by now, and ask again when the last check is over.

        Raises:
            RankFailedError: A rank is lost, or has failed.
        """
        if (verdict := self._liveness.known) is not None:
            raise RankFailedError(f"{verdict.text}.", verdict.rank)
        if time.monotonic() >= self._next:
            self._liveness.start_check(self._seconds)
            self._next = time.monotonic() + self._seconds + _GRACE_SECONDS


_threads: dict[Coordinator, Liveness] = {}


def liveness_of(coordinator: Coordinator) -> Liveness:
    """The thread of this process in a job; the first time, it begins to answer."""
    if coordinator not in _threads:
        _threads[coordinator] = Liveness(coordinator)
    return _threads[coordinator]


def end_liveness(coordinator: Coordinator) -> None:
    """Answer no more; the store may go."""
    if coordinator in _threads:
        _threads.pop(coordinator).stop()


@atexit.register
def _end_all() -> None:
    """A thread amid a call into the store can abort an interpreter that ends."""
    for coordinator in list(_threads):
        end_liveness(coordinator)
