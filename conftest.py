"""What holds for the tests of every package."""

from __future__ import annotations

import functools
import gc
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

# A job that a shell starts in the background ignores Ctrl-C, and all that it starts would do so too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def _launch_of(path: str) -> str | None:
    """The launch that the tests of a file share, if they do.

    A fixture of module scope is one. One of session scope may as well be a function that launches, so files
    that share a launch by it say so, with `pytest.mark.xdist_group`.
    """
    text = Path(path).read_text() if path.endswith(".py") else ""
    if found := re.search(r'pytest\.mark\.xdist_group\("([^"]+)"\)', text):
        return f"{Path(path).parent}: {found[1]}"
    return path if 'scope="module"' in text else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Send tests of one launch to one process of those that test side by side, so that it is launched once.

    This is what `--dist loadgroup` is for, which does nothing with pytest 9.2 and xdist 3.8: the name of a
    test cannot be changed any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByLaunch(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _launch_of(str(config.rootpath / nodeid.partition("::")[0])) or nodeid

    return ByLaunch(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the garbage collector leave alone what is there before the first test: torch, and the tests.

    It would go through a million objects each time, and a forked process that does so copies all their pages.
    Pages of the documentation say what is frozen when: theirs begin with nothing. What their examples write
    into folders of their own goes with the session.
    """
    if any(item.path.suffix == ".md" for item in session.items):
        tempfile.tempdir = tempfile.mkdtemp(prefix="examples-")
        session.config.add_cleanup(functools.partial(shutil.rmtree, tempfile.tempdir, ignore_errors=True))
    else:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run blocks of a page that continue one another once, in the last of them.

    Each would be run with all that it continues, so that the first block of a page ran as often as there are
    others.
    """
    blocks = [item for item in items if item.path.suffix == ".md" and hasattr(item, "code")]
    again = {
        earlier
        for number, earlier in enumerate(blocks)
        for later in blocks[number + 1 :]
        if earlier.path == later.path and later.code.startswith(earlier.code)
    }
    config.hook.pytest_deselected(items=list(again))
    items[:] = [item for item in items if item not in again]
