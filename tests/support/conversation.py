"""PostgreSQL's protocol as a bystander reads it: which statements a client runs, and when one is answered.

Fed with the bytes of one connection as they pass; keeps no more than an unfinished message.
"""

import struct
from collections.abc import Iterator

HEADER_BYTES = 5  # a letter, and a length that counts itself
# The first message has no letter: a request for encryption, which is answered with one and asked again, or
# the login.
ASKS_FOR_ENCRYPTION = (80877103, 80877104)


class ClientSide:
    """What a client says."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._greeted = False
        self._prepared: dict[bytes, str] = {}

    def statements(self, data: bytes) -> list[str]:
        """The statements which these bytes have the server run."""
        self._unread += data
        if not self._greeted and not self._greet():
            return []
        run = []
        for kind, body in _messages(self._unread):
            if kind == b"P":  # prepared under a name
                name, text, *_ = body.split(b"\0", 2)
                self._prepared[name] = text.decode()
            elif kind == b"B":  # and run by it
                _, name, *_ = body.split(b"\0", 2)
                run.append(self._prepared.get(name, ""))
            elif kind == b"Q":
                run.append(body.rstrip(b"\0").decode())
        return run

    def _greet(self) -> bool:
        while len(self._unread) >= 8:
            length, code = struct.unpack_from("!ii", self._unread)
            if len(self._unread) < length:
                return False
            del self._unread[:length]
            if code not in ASKS_FOR_ENCRYPTION:
                self._greeted = True
                return True
        return False


class ServerSide:
    """What the server says, from the beginning of an answer on."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def is_ready(self, data: bytes) -> bool:
        """Whether these bytes end the answer: outside of a transaction its commit is done by then."""
        self._unread += data
        return any(kind == b"Z" for kind, _ in _messages(self._unread))


def _messages(unread: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Take the whole messages off the front."""
    while len(unread) >= HEADER_BYTES:
        (length,) = struct.unpack_from("!i", unread, 1)
        if len(unread) < 1 + length:
            return
        kind, body = bytes(unread[:1]), bytes(unread[HEADER_BYTES : 1 + length])
        del unread[: 1 + length]
        yield kind, body
