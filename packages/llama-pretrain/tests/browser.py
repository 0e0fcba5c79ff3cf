"""Headless Chromium, driven through the pipe of its developer tools: what a page shows, says and asks for."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--disable-background-timer-throttling", "--disable-renderer-backgrounding", "--remote-debugging-pipe",
)  # fmt: skip
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_LIMIT = 60.0


def find_chromium() -> str | None:
    """Return the path of the browser, if there is one."""
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)


class Browser:
    """A browser with a profile of its own; leaving the context ends it."""

    def __init__(self, chromium: str, folder: Path) -> None:
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        # It reads what it is told on descriptor 3, and answers on 4.
        script = f'exec "$@" 3<&{read_end} 4>&{write_end}'
        command = [chromium, *_OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._number = 0
        self._unread = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        """Ask for something and return the answer; what happens meanwhile goes to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _LIMIT
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, url: str, width: int = 1280, height: int = 1000, *, dark: bool = False) -> Page:
        """Open an address in a window of this size."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        return page


class Page:
    """A page in a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Ask the browser for something of this page."""
        return self._browser.call(method, self._session, **params)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = _LIMIT) -> Any:
        """Wait until an expression in the page is true, and return it."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"{script}: not within {seconds} s; {self.text()}"
            time.sleep(0.1)
        return value

    def text(self) -> str:
        """What the page reads."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def move(self, x: float, y: float) -> None:
        """Put the pointer at a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Take a picture of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        path.write_bytes(base64.b64decode(data))

    def _clip(self, whole: bool) -> dict[str, object]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**size, "scale": 1}}

    @property
    def complaints(self) -> list[str]:
        """Errors of its scripts and of its policy, and what it wrote on the console."""
        self.evaluate("0")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        told = [json.dumps(event["params"]) for event in self._events() if event.get("method") in kinds]
        # Tests read the pixels of a canvas, and are told that this is slow.
        return [each for each in told if "getImageData" not in each]

    @property
    def requests(self) -> list[str]:
        """Addresses that it asked for."""
        self.evaluate("0")
        sent = [event for event in self._events() if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
