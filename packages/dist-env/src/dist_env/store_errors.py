"""What object stores answer instead of doing what was asked, as sentences that say what to do.

Errors of obstore hold addresses, headers and answers of the server, which may hold credentials: nothing of
that text leaves this module but the status, the error code and the region that the store names.
"""

from __future__ import annotations

import re

_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of this machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the service account of this machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, or the identity of this machine",
}
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>")
_STATUS = re.compile(r"(?:status code: |status: |HTTP status \w+ error \()(\d{3})")
_BROKE_OFF = re.compile(r"kind: Interrupted|request or response body error")
"""An answer that ended early. obstore asks again for the content of objects, and not for anything else."""
_RETRIES = re.compile(r"after (\d+) retries")
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired", "AccessDeniedExpired"}
_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
}
_REGIONS = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "EntityTooLarge", "InsufficientStorage"}


class StoreError(OSError):
    """An object store did not do what was asked: it cannot be reached, refuses the credentials, or is full.

    What it holds is as good as before. The message names the address and the remedy, and holds nothing else
    of what the store or its library said.

    Attributes:
        may_pass: Whether the same request may succeed later: the store could not be reached, did not answer
            in time, failed, or asked for fewer requests.
    """

    may_pass = False


class BrokeOffError(StoreError):
    """The answer ended early."""


class StoreSettingsError(ValueError):
    """An address or setting of an object store is not usable, or what reading it needs is not installed."""


def store_error(url: str, doing: str, error: Exception) -> StoreError:
    """The error for what obstore has raised.

    Args:
        url: What was asked for.
        doing: What could not be done, such as ``cannot be read``.
        error: Of obstore; one of this module is returned as it is.
    """
    if isinstance(error, StoreError):
        return error
    text = str(error)
    code = match[1] if (match := _CODE.search(text)) else ""
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    region = match[1] if (match := _REGION.search(text)) else ""
    reason = _reason(url.partition(":")[0], type(error).__name__, text, status, code, region)
    retries = f" after {match[1]} retries" if (match := _RETRIES.search(text)) else ""
    told = ", ".join(part for part in (f"HTTP {status}" if status else "", code) if part)
    broke_off = not told and _BROKE_OFF.search(text)
    kind = BrokeOffError if broke_off else StoreError
    found = kind(f"{url} {doing}{retries}: {reason}{f' ({told})' if told else ''}")
    found.may_pass = bool(broke_off) or _may_pass(text, status, code)
    return found


def lacks_bucket(error: Exception) -> bool:
    """Whether obstore has raised an error because the bucket does not exist, and not an object in it."""
    return "NoSuchBucket" in str(error) and _CODE.search(str(error)) is not None


def broke_off(error: Exception) -> bool:
    """Whether obstore has raised an error because an answer ended early."""
    return _BROKE_OFF.search(str(error)) is not None


def _reason(scheme: str, kind: str, text: str, status: int, code: str, region: str) -> str:
    where = _ENVIRONMENT.get(scheme, "the environment")
    if "169.254." in text or "/computeMetadata/" in text:
        # Where machines of a cloud are given theirs: asked for when the environment has none.
        return f"there are not any credentials. Set {where}"
    if code in _CLOCK or "too skewed" in text:
        return "the clock of this machine differs from that of the store. Set it, by NTP for one"
    if code in _REGIONS or "incorrectly configured region" in text or region or "region" in code.lower():
        named = f"={region}" if region else " to the region of the bucket"
        return f"the bucket is in another region. Set AWS_REGION{named}"
    if code == "NoSuchBucket" or (status == 404 and code != "NoSuchKey"):
        return "the bucket does not exist. Create it, or correct its name"
    if code in _CREDENTIALS or kind == "UnauthenticatedError" or status == 401:
        return f"the store does not accept the credentials. Set {where}"
    if kind == "PermissionDeniedError" or status == 403:
        return (
            "the credentials do not permit it. Give them the right to list, read, write and delete "
            f"there, or set others ({where})"
        )
    if code in _FULL or status == 507:
        return "the store is full, or a quota of it is used up. Free space there, or raise it"
    if status in (429, 503) or code in ("SlowDown", "ThrottlingException"):
        return "the store asks for fewer requests. Try again later, or raise the limits of the bucket"
    if status >= 500:
        return "the store failed: it may be full or out of order. Look at it, or free space there"
    if "timed out" in text.lower() or "kind: Timeout" in text or "operation timed out" in text:
        return "no answer in time. Look at the network, or raise timeout_seconds"
    if _BROKE_OFF.search(text):
        return "the answer broke off on its way. Look at the network, and try again"
    if "kind: Connect" in text or "error sending request" in text or "dns error" in text:
        return "the store cannot be reached. Look at the network and the endpoint in the environment"
    if "redential" in text or "metadata" in text.lower():
        return f"there are not any usable credentials. Set {where}"
    if isinstance(status, int) and status:
        return "the store refuses the request"
    return f"{kind} of obstore, whose text is left out because it may hold credentials"


def _may_pass(text: str, status: int, code: str) -> bool:
    if code in _FULL or status == 507:
        return False
    if status == 429 or status >= 500 or code in ("SlowDown", "ThrottlingException"):
        return True
    marks = ("timed out", "kind: Timeout", "kind: Connect", "error sending request", "dns error")
    return not status and any(mark in text for mark in marks)
