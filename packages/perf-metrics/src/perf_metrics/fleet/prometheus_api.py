"""Range queries to Prometheus: whole answers or an error, never a part of one."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

MOST_POINTS = 11_000
"""Points of a series that Prometheus gives in one answer (`maxPoints` of its API)."""

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

    When the server does not answer, or says that it cannot just now, the query is repeated until it does, for
    `patience_s` after the last good answer.

    Args:
        url: Address of the server, with the path that it is served under, if any.
        headers: Sent with every query, such as an authorization.
        patience_s: How long to repeat a query that has no answer, in seconds.
        timeout_s: How long to wait for one answer, in seconds.
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
        say: Callable[[str], None] | None = None,
    ) -> None:
        if not 0 <= patience_s < math.inf or not 0 < timeout_s < math.inf:
            raise ValueError(f"patience_s={patience_s!r}, timeout_s={timeout_s!r}: must be seconds")
        self._client = _client(headers or {}, timeout_s)
        self._address, self.url = _address(url)
        self._patience_s = patience_s
        self._say = say or _say_on_stderr

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
        return self._ask("/api/v1/query_range", form)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, path: str, form: Mapping[str, str]) -> list[RangeSeries]:
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
                    f"{self.url} gave no answer for {waited:.0f} s ({problem}); a part of the data would "
                    "look like the whole, so there is no report: run it again when the server is up"
                )
            if not silent:
                self._say(f"{self.url} gives no answer ({problem}); trying for {self._patience_s:.0f} s")
                silent = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _try(self, path: str, form: Mapping[str, str]) -> tuple[list[RangeSeries] | None, str]:
        """Return the answer, or why there is none yet."""
        import httpx

        try:
            response = self._client.post(self._address + path, data=dict(form))
            self._check_address(response)
            body = response.json()
        except (httpx.TransportError, httpx.DecodingError) as error:
            return None, f"{type(error).__name__}: {error}".rstrip(": ")
        except (json.JSONDecodeError, UnicodeDecodeError):
            return None, self._not_json(response)
        if response.status_code in _REFUSED or _ran_out_of_time(body):
            raise self._refusal(body, form["query"])
        if response.status_code != httpx.codes.OK:
            self._check_allowed(response)
            return None, f"status {response.status_code}"
        return _whole(body, self.url), ""

    def _check_address(self, response: httpx.Response) -> None:
        # Following would make a GET of a POST, without its form.
        if response.is_redirect:
            target = response.headers.get("location", "another address")
            raise PrometheusError(f"{self.url} redirects to {target}: give the address that answers itself")

    def _not_json(self, response: httpx.Response) -> str:
        self._check_allowed(response)
        if response.status_code == _TOO_LARGE:
            raise QueryTooLargeError(f"{self.url} answers with status {_TOO_LARGE}")
        if response.status_code < 500 and response.status_code != _BUSY:
            raise PrometheusError(
                f"{self.url} answers with status {response.status_code} and no JSON: is it a Prometheus "
                "server, and is the path right?"
            )
        return f"status {response.status_code}"

    def _check_allowed(self, response: httpx.Response) -> None:
        if response.status_code in (401, 403):
            raise PrometheusError(
                f"{self.url} answers with status {response.status_code}: give --bearer-token-file or --header"
            )

    def _refusal(self, body: object, query: str) -> PrometheusError:
        message = str(body.get("error") or "") if isinstance(body, dict) else ""
        if _ran_out_of_time(body) or any(words in message for words in _TOO_MUCH):
            return QueryTooLargeError(message)
        return PrometheusError(f"{self.url} refuses the query {query!r}: {message or 'it says no more'}")


def _client(headers: Mapping[str, str], timeout_s: float) -> httpx.Client:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "asking Prometheus needs httpx: pip install 'perf-metrics[prometheus]'"
        ) from error
    return httpx.Client(headers=dict(headers), timeout=timeout_s)


def _address(url: str) -> tuple[str, str]:
    """Return the address to ask, and the one to speak of, which has no password."""
    import httpx

    try:
        parsed = httpx.URL(url.rstrip("/"))
    except httpx.InvalidURL as error:
        raise ValueError(f"prometheus={url!r}: is no address ({error})") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"prometheus={url!r}: must be an address such as http://localhost:9090")
    return str(parsed), str(parsed.copy_with(userinfo=b""))


def _ran_out_of_time(body: object) -> bool:
    return isinstance(body, dict) and body.get("errorType") == "timeout"


def _whole(body: object, url: str) -> list[RangeSeries]:
    answer = body if isinstance(body, dict) else {}
    if answer.get("warnings") or answer.get("isPartial"):
        said = answer.get("warnings") or "isPartial"
        raise PrometheusError(f"{url} says that its answer may not be whole: {said}")
    data = answer.get("data")
    try:
        if answer["status"] != "success" or data["resultType"] != "matrix":  # type: ignore[index]
            raise ValueError("not a range of values")
        return [RangeSeries(one["metric"], one["values"]) for one in data["result"]]  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as error:
        raise PrometheusError(f"{url} did not answer as Prometheus does: {str(body)[:200]}") from error


def _say_on_stderr(text: str) -> None:
    print(f"perf-metrics: {text}", file=sys.stderr, flush=True)
