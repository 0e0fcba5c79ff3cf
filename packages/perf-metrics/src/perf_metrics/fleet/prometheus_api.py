"""Range queries to Prometheus, in chunks of a good size: complete answers or an error."""

from __future__ import annotations

import gc
import json
import math
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import lt
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard, runtime_checkable

if TYPE_CHECKING:
    import httpx

MOST_POINTS = 11_000
"""Points of a series that Prometheus gives in one answer (`maxPoints` of its API)."""

MOST_BYTES = 64 << 20
"""Bytes of an answer. One of the usual length has some megabytes; lists and texts in memory take ten times as
many."""

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_BUSY, _TOO_LARGE = 429, 413
_TOO_MUCH = ("too many", "maximum resolution", "exceeded the maximum", "exceeds the limit", "limit exceeded")
"""What servers say of a query that is too large: Prometheus, Mimir, Thanos, VictoriaMetrics."""
_REFUSED = (400, 404, 405, 414, 422)


class PrometheusError(OSError):
    """The server gave no answer, or one that cannot be used; the message says why."""


class QueryTooLargeError(PrometheusError):
    """The server would load more samples than it may; ask for a shorter time."""


@dataclass(frozen=True, slots=True)
class RangeSeries:
    """One series of an answer.

    Attributes:
        labels: With `__name__`, where the expression keeps it.
        points: Pairs of Unix time in seconds and the value as the text that came.
    """

    labels: Mapping[str, str]
    points: list[tuple[float, str]]


class PrometheusAPI:
    """A Prometheus server, or one that speaks its HTTP API (Thanos, Mimir, VictoriaMetrics).

    Answers are asked for unpacked, as packing takes a server longer than answering. Over a slow line give the
    header `Accept-Encoding: gzip`.

    When the server does not answer, or says that it cannot just now, the query is repeated until it does, for
    `patience_s` after the last good answer.

    Args:
        url: Address of the server, with the path that it is served under, if any.
        headers: Sent with every query, such as an authorization.
        patience_s: How long to repeat a query that has no answer, in seconds.
        timeout_s: How long to wait for the last byte of one answer, in seconds, however its bytes come.
        most_bytes: Size of an answer, unpacked, from which on a shorter time is asked for.
        say: Gets a line when the server stops answering, and one when it is back; by default to stderr.

    Raises:
        ModuleNotFoundError: The extra `prometheus` is not installed.
        ValueError: `url` is not an address.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        patience_s: float = 60.0,
        timeout_s: float = 120.0,
        most_bytes: int = MOST_BYTES,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if not 0 <= patience_s < math.inf or not 0 < timeout_s < math.inf:
            raise ValueError(
                f"patience_s={patience_s!r} and timeout_s={timeout_s!r} must be numbers of seconds."
            )
        self._client = _client(headers or {}, timeout_s)
        self._address, self.url = _address(url)
        self._patience_s = patience_s
        self._timeout_s, self._most_bytes = timeout_s, most_bytes
        self._say = say or _say_on_stderr
        self._line = _Line()
        self.malformed: Counter[str] = Counter()
        """Series of the answers so far that were left out, by what is wrong with them."""

    def query_range(self, query: str, start: float, end: float, step_s: float) -> list[RangeSeries]:
        """Return the series of an expression from `start` to `end`, both included.

        Args:
            query: PromQL.
            start: Unix time in seconds.
            end: Unix time in seconds.
            step_s: Seconds between points.

        Raises:
            QueryTooLargeError: A shorter time may work.
            PrometheusError: There is no answer, the server refuses the query, or its answer is not whole.
        """
        form = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:g}"}
        found = []
        for one in self._ask("/api/v1/query_range", form):
            series = _read_series(one, start - step_s, end + step_s)
            if isinstance(series, RangeSeries):
                found.append(series)
            else:
                self.malformed[series] += 1
        return found

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, path: str, form: Mapping[str, str]) -> list[object]:
        began = time.monotonic()
        pause, silent = _FIRST_PAUSE_S, False
        while True:
            answer, problem = self._try(path, form)
            if answer is not None:
                if silent:
                    self._say(f"{self.url} answers again")
                return answer
            waited = time.monotonic() - began
            if waited + pause > self._patience_s:
                raise PrometheusError(
                    f"{self.url} gave no answer for {waited:.0f} s ({problem}), and a part of the data "
                    "would look like the whole, so there is no report. Run it again when the server is up."
                )
            if not silent:
                self._say(f"{self.url} gives no answer ({problem}); trying for {self._patience_s:.0f} s")
                silent = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _try(self, path: str, form: Mapping[str, str]) -> tuple[list[object] | None, str]:
        """Return the answer, or why there is none yet."""
        import httpx

        try:
            with (
                self._line.cut_after(self._timeout_s) as is_late,
                self._client.stream(
                    "POST", self._address + path, data=dict(form), extensions={"trace": self._line.trace}
                ) as response,
            ):
                self._check_address(response)
                text = self._read(response)
                if is_late():  # an answer without a length ends where it is cut
                    raise httpx.ReadTimeout("")
        except (httpx.TransportError, httpx.DecodingError) as error:
            # A read that waits as long for one byte is late as well, whichever clock notices first.
            if is_late() or isinstance(error, httpx.ReadTimeout):
                return None, f"the answer was not whole after {self._timeout_s:g} s"
            return None, f"{type(error).__name__}: {error}".rstrip(": ")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:  # too many digits; brackets by thousands
            return None, self._not_json(response, error)
        if response.status_code in _REFUSED or _ran_out_of_time(body):
            raise self._refusal(body, form["query"])
        if response.status_code != httpx.codes.OK:
            self._check_allowed(response)
            return None, f"status {response.status_code}"
        return _whole(body, self.url, text), ""

    def _read(self, response: httpx.Response) -> bytes:
        packed = response.headers.get("content-encoding", "identity").strip().lower()
        if packed not in ("identity", "gzip", ""):
            # What other packings grow to is without a bound.
            raise PrometheusError(f"{self.url} answers in the encoding {packed!r}, and gzip was asked for.")
        text = bytearray()
        for piece in response.iter_bytes():
            text += piece
            if len(text) > self._most_bytes:
                raise QueryTooLargeError(
                    f"{self.url} answers with more than {self._most_bytes:,} bytes, also for one point of "
                    "each series. Name fewer of them by --selector."
                )
        return bytes(text)

    def _check_address(self, response: httpx.Response) -> None:
        # Following would make a GET of a POST, without its form.
        if response.is_redirect:
            target = response.headers.get("location", "another address")
            raise PrometheusError(f"{self.url} redirects to {target}. Give the address that answers itself.")

    def _not_json(self, response: httpx.Response, why: Exception) -> str:
        self._check_allowed(response)
        if response.status_code == _TOO_LARGE:
            raise QueryTooLargeError(f"{self.url} answers with status {_TOO_LARGE}.")
        if response.status_code < 500 and response.status_code != _BUSY:
            raise PrometheusError(
                f"{self.url} answers with status {response.status_code} and no JSON ({str(why)[:100]}). Is "
                "it a Prometheus server, and is the path right?"
            )
        return f"status {response.status_code}"

    def _check_allowed(self, response: httpx.Response) -> None:
        if response.status_code in (401, 403):
            raise PrometheusError(
                f"{self.url} answers with status {response.status_code}. Give --bearer-token-file or "
                "--header."
            )

    def _refusal(self, body: object, query: str) -> PrometheusError:
        message = str(body.get("error") or "")[:500] if isinstance(body, dict) else ""
        if _ran_out_of_time(body) or any(words in message for words in _TOO_MUCH):
            return QueryTooLargeError(message)
        return PrometheusError(f"{self.url} refuses the query {query!r}: {message or 'it says no more'}.")


def _client(headers: Mapping[str, str], timeout_s: float) -> httpx.Client:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "asking Prometheus needs httpx. Install it with `pip install 'perf-metrics[prometheus]'`."
        ) from error
    return httpx.Client(headers={"Accept-Encoding": "identity, gzip;q=0.5", **headers}, timeout=timeout_s)


@runtime_checkable
class _Stream(Protocol):
    """A connection of httpx."""

    def get_extra_info(self, info: str) -> object:
        """What is below it, by name."""


class _Line:
    """The connection that answers come by, to be cut when one takes too long.

    httpx only bounds the time between two bytes, so that a byte a second would hold it for ever.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def trace(self, event: str, found: Mapping[str, object]) -> None:
        """Keep the socket of a new connection; for the extension "trace" of httpx."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            stream = found["return_value"]
            line = stream.get_extra_info("socket") if isinstance(stream, _Stream) else None
            self._socket = line if isinstance(line, socket.socket) else None

    @contextmanager
    def cut_after(self, seconds: float) -> Iterator[Callable[[], bool]]:
        """Cut the connection after so many seconds; yields what tells whether that has been done."""
        late = threading.Event()

        def cut() -> None:
            late.set()
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes up who waits for a byte of it

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            yield late.is_set
        finally:
            timer.cancel()


def _address(url: str) -> tuple[str, str]:
    """Return the address to ask, and the one to speak of, which has no password."""
    import httpx

    try:
        parsed = httpx.URL(url.rstrip("/"))
    except httpx.InvalidURL as error:
        raise ValueError(f"prometheus={url!r} is not an address ({error}).") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"prometheus={url!r} must be an address such as http://localhost:9090.")
    return str(parsed), str(parsed.copy_with(userinfo=b""))


def _ran_out_of_time(body: object) -> bool:
    return isinstance(body, dict) and body.get("errorType") == "timeout"


def _whole(body: object, url: str, text: bytes) -> list[object]:
    answer = body if isinstance(body, dict) else {}
    if answer.get("warnings") or answer.get("isPartial"):
        said = str(answer.get("warnings") or "isPartial")[:500]
        raise PrometheusError(f"{url} says that its answer may not be whole: {said}.")
    try:
        if answer["status"] != "success" or answer["data"]["resultType"] != "matrix":
            raise ValueError("not a range of values")
        if not isinstance(series := answer["data"]["result"], list):
            raise ValueError("not a list of series")
        return series
    except (KeyError, TypeError, ValueError) as error:
        shown = text[:200].decode(errors="replace")
        raise PrometheusError(f"{url} did not answer as Prometheus does: {shown}.") from error


def _read_series(series: object, first: float, last: float) -> RangeSeries | str:
    """Return a series of an answer about some time, or what is wrong with it."""
    if not isinstance(series, dict):
        return "a series is not an object"
    labels, points = series.get("metric"), series.get("values")
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        return "its labels are not texts"
    if not isinstance(points, list):
        return "it has no list of values"
    # Over millions of points: no loop of Python's own.
    if not {*map(type, points)} <= {list} or not {*map(len, points)} <= {2}:
        return "a point is not a pair of time and value"
    if not points:
        return RangeSeries(labels, points)
    times, texts = zip(*points, strict=True)
    ascend = {*map(type, times)} <= {int, float} and all(map(lt, times, times[1:]))
    # Neither a number that is none nor one of a thousand digits lies between two times.
    if not ascend or not first <= times[0] or not times[-1] <= last:
        within = all(type(one) in (int, float) and first <= one <= last for one in times)
        return "its times do not ascend" if within else "a time is not within the time that was asked for"
    return RangeSeries(labels, points) if _are_numbers(texts) else "a value is not the text of a number"


def _are_numbers(texts: Sequence[object]) -> bool:
    try:
        # "1_0" is Python's own way to write ten.
        return _are_texts(texts) and "_" not in "".join(texts) and len([*map(float, texts)]) > 0
    except ValueError:
        return False


def _are_texts(values: Sequence[object]) -> TypeGuard[Sequence[str]]:
    return {*map(type, values)} == {str}


def _say_on_stderr(text: str) -> None:
    print(f"perf-metrics: {text}", file=sys.stderr, flush=True)


Progress: TypeAlias = Callable[[float], object]
"""Called with the seconds that have been read more."""

_FIRST_STEPS = 120
_POINTS_WANTED = 1_000_000
"""Points in an answer: 30 MB of JSON, whatever the size of the fleet. Of 10,000 GPUs that is 100 steps; the
labels of as many series take as long to read as some 20."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's collector from looking at a million points, which are lists, again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_in_chunks(
    read: Callable[[float, float], int], start: float, end: float, step_s: float, progress: Progress
) -> None:
    """Call `read` for one stretch after another, ends included, until all steps have been read.

    Args:
        read: Reads from a first to a last Unix time in seconds, and returns the number of points. When it
            raises QueryTooLargeError, it is called again with a shorter stretch.
        start: Unix time of the first step in seconds.
        end: Unix time in seconds that no step passes.
        step_s: Seconds between steps.
        progress: Called after each stretch.

    Raises:
        QueryTooLargeError: Even one step is too much for the server.
    """
    left, done, wanted = int((end - start) // step_s) + 1, 0, _FIRST_STEPS
    while left:
        steps = min(wanted, left)
        first = start + done * step_s
        try:
            with _collector_paused():
                points = read(first, first + (steps - 1) * step_s)
        except QueryTooLargeError:
            if steps == 1:
                raise
            wanted = max(1, steps // 4)
            continue
        progress(steps * step_s)
        done, left = done + steps, left - steps
        # At most twice as long, as a busy hour may follow a quiet one.
        wanted = max(1, min(2 * steps, MOST_POINTS, steps * _POINTS_WANTED // max(1, points)))
