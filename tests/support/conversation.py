"""Parses PostgreSQL's protocol from the outside: which statements a client runs, and when one is answered.

Gets the bytes of one connection as they pass; stores at most one incomplete message.
"""

import struct
from collections.abc import Iterator

HEADER_BYTES = 5  # a type byte, and a length that includes itself
# The first message has no type byte: it is the login, or a request for encryption, which is answered with one
# byte and followed by another first message.
ENCRYPTION_REQUESTS = (80877103, 80877104)


class ClientSide:
    """The messages of a client."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._logged_in = False
        self._prepared: dict[bytes, str] = {}

    def statements(self, data: bytes) -> list[str]:
        """Return the statements that these bytes execute."""
        self._unread += data
        if not self._logged_in and not self._read_startup():
            return []
        run = []
        for kind, body in _messages(self._unread):
            if kind == b"P":  # Parse: a statement with a name
                name, text, *_ = body.split(b"\0", 2)
                self._prepared[name] = text.decode()
            elif kind == b"B":  # Bind: executes it by its name
                _, name, *_ = body.split(b"\0", 2)
                run.append(self._prepared.get(name, ""))
            elif kind == b"Q":
                run.append(body.rstrip(b"\0").decode())
        return run

    def _read_startup(self) -> bool:
        while len(self._unread) >= 8:
            length, code = struct.unpack_from("!ii", self._unread)
            if len(self._unread) < length:
                return False
            del self._unread[:length]
            if code not in ENCRYPTION_REQUESTS:
                self._logged_in = True
                return True
        return False


class ServerSide:
    """The messages of the server, from the start of an answer."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def is_ready(self, data: bytes) -> bool:
        """Whether these bytes end the answer; outside of a transaction its commit is then done."""
        self._unread += data
        return any(kind == b"Z" for kind, _ in _messages(self._unread))


def _messages(unread: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Remove the complete messages from the buffer."""
    while len(unread) >= HEADER_BYTES:
        (length,) = struct.unpack_from("!i", unread, 1)
        if len(unread) < 1 + length:
            return
        kind, body = bytes(unread[:1]), bytes(unread[HEADER_BYTES : 1 + length])
        del unread[: 1 + length]
        yield kind, body
