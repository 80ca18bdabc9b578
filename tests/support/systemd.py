"""systemd's side of sd_notify: a datagram socket, and what was said on it."""

import asyncio
import socket
import time
from typing import TYPE_CHECKING

from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable


class NotifySocket(asyncio.DatagramProtocol):
    """Listens at an address as NOTIFY_SOCKET has it: a path, or a name that begins with @."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.messages: list[str] = []
        self.heard: Callable[[str], None] = lambda _: None  # called with each as it comes
        self._transport: asyncio.BaseTransport | None = None

    async def open(self) -> None:
        """Listen."""
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind("\0" + self.address[1:] if self.address.startswith("@") else self.address)
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, sock=receiver
        )

    def close(self) -> None:
        """Listen no more; a path stays, with nobody behind it."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, _: object) -> None:
        """As asyncio calls it."""
        self.messages.append(data.decode())
        self.heard(data.decode())

    async def received(self, count: int, message: str = "") -> list[str]:
        """Wait until that many have come that begin so; give them."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        while len(found := [one for one in self.messages if one.startswith(message)]) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{found} of {count} within {CONDITION_TIMEOUT_SECONDS} s")
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        return found
