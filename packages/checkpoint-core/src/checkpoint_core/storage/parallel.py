"""One action on several threads, for reading and writing, which release the interpreter's lock."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Thread
from typing import TypeVar

from checkpoint_core.latch import Latch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    threads: int, items: Sequence[_Item], action: Callable[[Sequence[_Item]], _Result]
) -> list[_Result]:
    """Divide items among threads, in order.

    ``concurrent.futures`` refuses work once the interpreter is about to exit, which is just when the last
    asynchronous save is written; plain threads do not.

    Args:
        threads: How many threads at most, this one included.
        items: What to divide.
        action: Called once for each consecutive group of items.

    Returns:
        The result for each group.

    Raises:
        BaseException: The first failure of any group, after all have ended.
    """
    count = max(min(threads, len(items)), 1)
    bounds = [len(items) * number // count for number in range(count + 1)]
    groups = [items[begin:end] for begin, end in pairwise(bounds)]
    results: dict[int, _Result] = {}
    failures: list[BaseException] = []
    ended = [Latch() for _ in range(1, count)]

    def run(number: int) -> None:
        try:
            results[number] = action(groups[number])
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread below
            failures.append(error)
        finally:
            if number:
                ended[number - 1].open()

    helpers = [Thread(target=run, args=(number,)) for number in range(1, count)]
    started = 0
    try:
        for helper in helpers:
            helper.start()
            started += 1
        run(0)
    except BaseException as error:  # noqa: BLE001 - raised below, when no thread uses the file any more
        failures.append(error)
    for latch in ended[:started]:
        _wait(latch, failures)
    if failures:
        raise failures[0]
    return [results[number] for number in range(count)]


def _wait(latch: Latch, interruptions: list[BaseException]) -> None:
    """Wait to the end: Ctrl-C must not leave a thread writing to a file that is closed by then."""
    while True:
        try:
            return latch.wait()
        except BaseException as error:  # noqa: BLE001 - raised by the caller once nothing runs any more
            interruptions.append(error)
