"""The outcome of one request, which is always a value; and the Retry-After header of a response."""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import NamedTuple

SUCCESS = range(200, 300)  # the status alone decides
MAX_RETRY_AFTER_SECONDS = 31_536_000.0  # same as the CHECK of the column
_SECONDS = re.compile(r"[0-9]{1,20}")


class Failure(StrEnum):
    """Why there is no response status. With a status, the error code is HTTP_<status>."""

    TIMEOUT = "TIMEOUT"  # the deadline passed before the status arrived
    CONNECT_FAILED = "CONNECT_FAILED"  # no connection, or it was lost before the status arrived
    DNS_FAILED = "DNS_FAILED"
    TLS_FAILED = "TLS_FAILED"
    ADDRESS_BLOCKED = "ADDRESS_BLOCKED"
    PROTOCOL_ERROR = "PROTOCOL_ERROR"  # the response is not valid HTTP
    INTERNAL = "INTERNAL"  # an error in webhookd or its machine


class RequestFailed(Exception):
    """There is no response status. Raised where the reason is known; the client makes it an Outcome."""

    def __init__(self, failure: Failure, detail: str = "") -> None:
        super().__init__(failure, detail)
        self.failure = failure
        self.detail = detail


class Outcome(NamedTuple):
    """The result of a request. A 2xx status is success and has no error code."""

    response_status: int | None
    error_code: str | None
    duration_ms: int
    retry_after_seconds: float | None = None
    response_excerpt: bytes = b""
    detail: str = ""  # why there is no status, as text for people

    @property
    def delivered(self) -> bool:
        return self.error_code is None


def retry_after_seconds(retry_after: str | None, date: str | None, now: datetime) -> float | None:
    """Parse either form of RFC 9110, bounded; None if the header is missing or invalid.

    A date is measured against the endpoint's own `Date`, so the two clocks may differ.
    """
    if retry_after is None:
        return None
    text = retry_after.strip()
    if _SECONDS.fullmatch(text):
        return min(float(text), MAX_RETRY_AFTER_SECONDS)
    until = _time(text)
    if until is None:
        return None
    since = (_time(date) if date else None) or now
    return min(max((until - since).total_seconds(), 0.0), MAX_RETRY_AFTER_SECONDS)


def _time(text: str) -> datetime | None:
    try:
        parsed = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
