"""Headless Chromium: what a page says on the console, what it asks for, and what it looks like."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--enable-logging=stderr", "--log-level=0", "--virtual-time-budget=2000",
)  # fmt: skip
LIMIT_S = 600
"""Seconds that a page may take; it is fast, where the machine is."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PAGE_MESSAGE = re.compile(r":CONSOLE[:(]\d+\)?\] \"(.*)\", source: (.*)")


def chromium_or_skip() -> str:
    """Return the path of the browser; skip the test without one, or with PERF_METRICS_NEED_SERVERS=1 fail."""
    path = next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)
    if path is not None:
        return path
    text = "not on the path: chromium (Debian: apt-get install chromium)"
    if os.environ.get("PERF_METRICS_NEED_SERVERS") == "1":
        pytest.fail(f"PERF_METRICS_NEED_SERVERS=1, but {text}")
    pytest.skip(text)


@dataclass(frozen=True)
class Visit:
    """What a page did.

    Attributes:
        console: What it wrote on the console, errors of scripts and of its policy among it.
        requests: Addresses that the page asked for, itself among them.
        html: The document after its scripts ran.
    """

    console: list[str]
    requests: list[str]
    html: str


def visit(chromium: str, page: Path | str, folder: Path, *options: str) -> Visit:
    """Open a page from disk, or an address; options are those of the browser."""
    net_log = folder / "net-log.json"
    done = _run(chromium, page, folder, "--dump-dom", f"--log-net-log={net_log}", *options)
    console = [match[1] for match in _PAGE_MESSAGE.finditer(done.stderr)]
    return Visit(console, _requests(net_log), done.stdout)


def screenshot(chromium: str, page: Path, folder: Path, picture: Path) -> None:
    """Take a picture of the upper part of a page."""
    _run(chromium, page, folder, "--window-size=1240,1800", f"--screenshot={picture}")


def _run(chromium: str, page: Path | str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    profile = folder / "profile"
    address = page if isinstance(page, str) else page.as_uri()
    command = [chromium, *_OPTIONS, f"--user-data-dir={profile}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)


def _requests(net_log: Path) -> list[str]:
    """Return the addresses that pages asked for; the browser's own errands have no initiator of a page."""
    log = json.loads(net_log.read_text())
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    params = [event["params"] for event in log["events"] if event["type"] == start and "params" in event]
    return [one["url"] for one in params if one.get("initiator", "not an origin") != "not an origin"]
