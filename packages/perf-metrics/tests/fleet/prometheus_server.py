"""The real Prometheus server, on a free port of this machine, with an old block of data or a config."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from ports import free_port

BINARIES = ("prometheus", "promtool")
BLOCK_HOURS = 54
"""Length of the blocks that are made, at most; one of those that Prometheus has."""
_PATIENCE_S = 30.0
_POLL_S = 0.05


def missing_binaries() -> list[str]:
    """Return which of the binaries are not on the path."""
    return [name for name in BINARIES if shutil.which(name) is None]


def backfill(openmetrics: Path, data: Path) -> None:
    """Turn a file of OpenMetrics with time stamps into blocks that a server can serve.

    Args:
        openmetrics: Ends with `# EOF`; promtool reads it once for each block, and once before.
        data: The `data_folder` of a server that is not running.

    Raises:
        RuntimeError: promtool refuses the file; with what it says.
    """
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet"]
    command += [f"--max-block-duration={BLOCK_HOURS}h", str(openmetrics), str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


class PrometheusServer:
    """A Prometheus server of its own, on the loopback device; a context manager that starts and stops it.

    Args:
        folder: For its data, its config and its log.
        config: Text of its config file; without one it scrapes nothing.
        port: To listen on; by default a free one. It is kept over a `stop` and `start`.
        options: Further options of the binary, such as "--query.max-samples=1000".
    """

    def __init__(
        self, folder: Path, config: str | None = None, port: int | None = None, options: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self.data_folder = folder / "data"
        self.port = free_port() if port is None else port
        self._options = options
        self._config = Path("/dev/null") if config is None else folder / "prometheus.yml"
        self._process: subprocess.Popen[bytes] | None = None
        self.data_folder.mkdir(parents=True, exist_ok=True)
        if config is not None:
            self._config.write_text(config)

    @property
    def url(self) -> str:
        """Address of its HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        """Whether it has been started, and not ended since."""
        return self._process is not None

    @property
    def log(self) -> str:
        """What it has written so far, over all its starts."""
        return (self.folder / "prometheus.log").read_text(errors="replace")

    def backfill(self, openmetrics: Path, data_folder: Path | None = None) -> None:
        """Give it the samples of a file; see the function `backfill`. It must not run."""
        backfill(openmetrics, data_folder or self.data_folder)

    def start(self) -> PrometheusServer:
        """Start it, and return when it answers queries.

        Raises:
            RuntimeError: It does not become ready; with its log.
        """
        command = [
            "prometheus",
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self.data_folder}",
            # Blocks of years ago would be deleted as too old.
            "--storage.tsdb.retention.time=10y",
            f"--web.listen-address=127.0.0.1:{self.port}",
            *self._options,
        ]
        with (self.folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(
                    f"prometheus did not become ready on {self.url}; its log:\n{self.log[-4000:]}"
                )
            time.sleep(_POLL_S)
        return self

    def query(self, promql: str, time_s: float) -> list[dict[str, Any]]:
        """Return the series of an instant query, each with its "metric" and "value" or "values".

        Raises:
            ValueError: The server refuses the query; with its message.
        """
        form = urllib.parse.urlencode({"query": promql, "time": time_s})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{form}", timeout=60) as answer:
                series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None
        return series

    def stop(self) -> None:
        """End it as an operator does (SIGTERM), and return when it is gone; nothing if it does not run."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE_S)
            finally:
                self.kill()

    def kill(self) -> None:
        """End it at once (SIGKILL); nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> PrometheusServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
