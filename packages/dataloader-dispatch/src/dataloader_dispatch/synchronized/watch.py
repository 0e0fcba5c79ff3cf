"""An alarm that reaches ranks which exchange nothing while all goes well."""

from __future__ import annotations

import atexit
import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Self

import torch.distributed as dist

from dataloader_dispatch.rank_group import RankGroup

_LOOK_SECONDS = 0.2
_HEARD_SECONDS = 5.0
_RANKS_PER_LOOK_SECOND = 5000.0
"""So many questions a second the store is asked at most, whatever the number of ranks."""


@dataclass(frozen=True)
class Alarm:
    """Why a rank cannot go on.

    Attributes:
        index: Position of the rank among those of the group.
        text: What happened.
        is_failure: Whether its loader raised; otherwise it ended before its length.
    """

    index: int
    text: str
    is_failure: bool


class Watch:
    """Looks out for the alarms of other ranks, in a thread of its own, for the time of one pass.

    A rank that knows of a trouble one batch ahead raises the alarm, waits until the threads of the others
    have heard it, and only then lets its user have the batch before. So the others know before they begin
    a step in which that rank would be missing, and a pass without trouble costs no exchange at all.

    Args:
        group: The ranks.
        number: Number of the pass, the same on all ranks.
    """

    def __init__(self, group: RankGroup, number: int) -> None:
        self._store = group.store(f"watch/{number}")
        self._size = group.size
        self._seconds = max(_LOOK_SECONDS, group.size / _RANKS_PER_LOOK_SECOND)
        self._ended = threading.Event()
        self.alarm: Alarm | None = None
        self._thread = threading.Thread(target=self._listen, name="dataloader_dispatch watch", daemon=True)
        self._thread.start()
        # A thread inside the store while the interpreter goes away would take the process down.
        atexit.register(self.close)

    def raise_alarm(self, alarm: Alarm) -> None:
        """Tell the other ranks, and wait a few seconds at most until they have heard it."""
        self._store.set("alarm", json.dumps(asdict(alarm)))
        end = time.monotonic() + max(_HEARD_SECONDS, 3 * self._seconds)
        while self._store.add("heard", 0) < self._size and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS / 10)

    def look(self) -> Alarm | None:
        """The alarm, if there is one, by asking now."""
        if self.alarm is None and self._store.check(["alarm"]):
            self.alarm = Alarm(**json.loads(self._store.get("alarm")))
        return self.alarm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _listen(self) -> None:
        try:
            while not self._ended.wait(self._seconds):
                if self.look() is not None:
                    self._store.add("heard", 1)
                    return
        except dist.DistNetworkError:
            # The store went with the process that held it. Nobody can raise an alarm now, and the closing
            # agreement of the pass will say who is lost.
            return
