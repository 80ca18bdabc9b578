"""What became of one request: a value, whatever happened."""

from enum import StrEnum
from typing import NamedTuple

SUCCESS = range(200, 300)  # the status decides


class Failure(StrEnum):
    """Why there is no status. With one, the code of a failure is HTTP_<status>."""

    TIMEOUT = "TIMEOUT"  # the deadline came before the status
    CONNECT_FAILED = "CONNECT_FAILED"  # no connection, or it was lost before the status
    DNS_FAILED = "DNS_FAILED"
    TLS_FAILED = "TLS_FAILED"
    ADDRESS_BLOCKED = "ADDRESS_BLOCKED"
    PROTOCOL_ERROR = "PROTOCOL_ERROR"  # what came back is not HTTP
    INTERNAL = "INTERNAL"  # our fault


class Unanswered(Exception):
    """There is no status, and this is why: raised where it is known, made an Outcome by the client."""

    def __init__(self, failure: Failure, detail: str = "") -> None:
        super().__init__(failure, detail)
        self.failure = failure
        self.detail = detail


class Outcome(NamedTuple):
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
