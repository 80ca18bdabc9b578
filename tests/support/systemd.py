"""The receiving side of sd_notify: a datagram socket that records messages."""

import asyncio
import socket
import time
from typing import TYPE_CHECKING

from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable


class NotifySocket(asyncio.DatagramProtocol):
    """Listens at an address in the form of NOTIFY_SOCKET: a path, or an abstract name starting with @."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.messages: list[str] = []
        self.on_message: Callable[[str], None] = lambda _: None  # called with each message
        self._transport: asyncio.BaseTransport | None = None

    async def open(self) -> None:
        """Listen."""
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind("\0" + self.address[1:] if self.address.startswith("@") else self.address)
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, sock=receiver
        )

    def close(self) -> None:
        """Stop listening; the path of the socket remains."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, _: object) -> None:
        """Called by asyncio."""
        self.messages.append(data.decode())
        self.on_message(data.decode())

    async def received(self, count: int, message: str = "") -> list[str]:
        """Wait until this many messages with this prefix have arrived; returns them."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        while len(found := [text for text in self.messages if text.startswith(message)]) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{found} of {count} within {CONDITION_TIMEOUT_SECONDS} s")
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        return found
