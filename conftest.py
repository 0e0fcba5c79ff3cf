"""What holds for the tests of every package."""

from __future__ import annotations

import gc
import signal

import pytest

# A job that a shell starts in the background ignores Ctrl-C, and all that it starts would do so too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave out what was imported, torch above all, whenever garbage is collected from here on."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one launch go to one process of those that test side by side, so that it is launched once.

    A fixture of module scope is such a launch. One of session scope may as well be a function that launches,
    so files that share a launch by it say so themselves, with `pytest.mark.xdist_group`.
    """
    for item in items:
        if isinstance(item, pytest.Function) and _has_launch(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _has_launch(item: pytest.Function) -> bool:
    found = item._fixtureinfo.name2fixturedefs
    own = item.nodeid.partition("::")[0]
    return any(each.scope == "module" and each.baseid == own for defs in found.values() for each in defs)
