"""What a daemon answers a command: read within bounds, decoded, and what went wrong instead in words."""

import http.client
import socket
import ssl
import time
from typing import Any, Final, TypeVar

import msgspec

from webhookd.cli.text import escaped
from webhookd.core.errors import WebhookdError

Value = TypeVar("Value")

# A page of the longest rows is far below this.
MAX_ANSWER_BYTES = 64 * 1024 * 1024

_CHUNK_BYTES = 65_536


class Answer:
    """What the daemon said. A payload in it may have numbers that Python cannot hold: see `fields`."""

    def __init__(self, body: bytes) -> None:
        self.body: Final = body

    @property
    def value(self) -> dict[str, Any]:
        """All of it, decoded: whatever is asked, the answer is an object."""
        return decoded(self.body, dict[str, Any])

    @property
    def fields(self) -> dict[str, msgspec.Raw]:
        """The members of an object, each still JSON."""
        return decoded(self.body, dict[str, msgspec.Raw])


class Page(msgspec.Struct):
    """One page of a list; its rows are still JSON."""

    items: list[msgspec.Raw]
    next_cursor: int | str | None


def read_body(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body, if it ends in time and comes whole."""
    body = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise http.client.HTTPException("its answer has no end")
        if time.monotonic() > deadline:
            raise TimeoutError
    if response.length:
        raise http.client.HTTPException("its answer did not come whole")
    return bytes(body)


def in_words(error: Exception) -> str:
    """Why there was no answer."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not trusted: {escaped(error.verify_message)}"
        case TimeoutError():
            return "no answer in time"
        case socket.gaierror():
            return "its name has no address"
        case OSError(strerror=str(text)):
            return escaped(text)
        case http.client.RemoteDisconnected():
            return "it ended the connection"
        case _:
            return escaped(str(error)) or type(error).__name__


def decoded(body: bytes, kind: type[Value]) -> Value:
    """JSON as a value; what is not as we expect was not said by a webhookd."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WebhookdError("what is there does not answer as webhookd does") from error
