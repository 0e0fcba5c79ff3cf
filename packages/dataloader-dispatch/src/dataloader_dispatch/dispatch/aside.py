"""What the garbage collector may start at any moment, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_aside(action: Callable[[], None], *, wait: bool = True) -> None:
    """Run something in a thread of its own, or here where Python is about to end and starts no more threads.

    The garbage collector may close a data loader while torch.compile traces on this thread, where no real
    tensor can be made or sent; or while this thread holds a lock that closing takes.

    Args:
        action: What to run.
        wait: Until it has ended.
    """
    # The garbage collector may run on a daemon thread, for which Python would not wait.
    thread = threading.Thread(target=action, name="dataloader-dispatch-close", daemon=False)
    try:
        thread.start()
    except RuntimeError:
        action()
        return
    if wait:
        thread.join()
