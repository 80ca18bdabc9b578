"""What became of one request: a value, whatever happened."""

from dataclasses import dataclass
from enum import StrEnum

_SUCCESS = range(200, 300)


class Failure(StrEnum):
    """Why there is no status. With one, the code of a failure is HTTP_<status>."""

    TIMEOUT = "TIMEOUT"  # the deadline came before the status
    CONNECT_FAILED = "CONNECT_FAILED"  # no connection, or it was lost before the status
    DNS_FAILED = "DNS_FAILED"
    TLS_FAILED = "TLS_FAILED"
    ADDRESS_BLOCKED = "ADDRESS_BLOCKED"
    PROTOCOL_ERROR = "PROTOCOL_ERROR"  # what came back is not HTTP
    INTERNAL = "INTERNAL"  # our fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """Success is a 2xx, and has no error code."""

    response_status: int | None
    error_code: str | None
    duration_ms: int
    retry_after_seconds: float | None = None
    response_excerpt: bytes = b""
    detail: str = ""  # why there was no status, for a person

    @property
    def delivered(self) -> bool:
        return self.error_code is None


def failed(failure: Failure, duration_ms: int, detail: str = "") -> Outcome:
    """There was no status."""
    return Outcome(None, failure.value, duration_ms, detail=detail)


def answered(status: int, duration_ms: int, retry_after_seconds: float | None, excerpt: bytes) -> Outcome:
    """The status decides."""
    if status in _SUCCESS:
        return Outcome(status, None, duration_ms, None, excerpt)
    return Outcome(status, f"HTTP_{status}", duration_ms, retry_after_seconds, excerpt)
