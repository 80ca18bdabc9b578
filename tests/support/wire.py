"""A proxy to the database on 127.0.0.1 that a test can break in every way a network can break.

Counts the connections that it carried and broke.
"""

import asyncio
import contextlib
import re
import socket
import struct
from urllib.parse import urlsplit

from tests.support.conversation import ClientSide, ServerSide

CHUNK_BYTES = 65536


class Wire:
    """Forwards bytes in both directions between open() and close()."""

    def __init__(self, dsn: str) -> None:
        self._far = urlsplit(dsn)
        assert self._far.port is not None
        self._target = (self._far.hostname or "", self._far.port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._drops_everything = False
        self._loses: re.Pattern[str] | None = None
        self._to_lose = 0
        self._loses_silently = False
        self._lines: set[_Line] = set()
        # Server sides of connections that only the client has closed.
        self._abandoned: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.carried = 0
        self.broken = 0
        self.answers_lost = 0

    async def open(self) -> None:
        """Accept connections; after a cut, on the same port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def dsn(self) -> str:
        """The DSN of the database through this proxy."""
        login = self._far.netloc.rpartition("@")[0]
        return self._far._replace(netloc=f"{login}@127.0.0.1:{self.port}").geturl()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._lines)

    def stall(self) -> None:
        """Keep connections open, but forward nothing until `flow`."""
        self._flowing.clear()

    def blackhole(self) -> None:
        """Keep and accept connections, but silently drop every byte."""
        self._drops_everything = True
        for line in self._lines:
            line.is_broken = True
        self.broken += len(self._lines)

    def flow(self) -> None:
        """Forward again. Connections that lost bytes stay broken; new connections work."""
        self._drops_everything = False
        self._flowing.set()

    def half_open(self) -> None:
        """Close the server's side of each connection without telling the client; new connections work."""
        for line in self._lines:
            line.is_broken = True
            line.far.transport.abort()
        self.broken += len(self._lines)

    def reset(self) -> None:
        """End each connection with a TCP reset to both sides; new connections work."""
        self.broken += len(self._lines)
        for line in list(self._lines):
            line.reset()

    def lose_answers(self, statement: str, count: int, *, silently: bool = False) -> None:
        """Execute the next `count` matching statements, but drop their answers and reset their connections.

        With `silently` the connections stay open: the client still waits when the caller breaks something.
        """
        self._loses, self._to_lose, self._loses_silently = re.compile(statement), count, silently

    @property
    def answers_to_lose(self) -> int:
        """How many of these answers are still to be dropped."""
        return self._to_lose

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        assert self._server is not None
        self._server.close()
        self.broken += len(self._lines)
        for line in self._lines:
            line.abort()

    async def close(self) -> None:
        """Shut the proxy down at the end of a test."""
        self.cut()
        for writer in self._abandoned:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:  # the server is down: close the client's connection
            writer.transport.abort()
            return
        line = _Line(writer, far_writer, is_broken=self._drops_everything)
        self._lines.add(line)
        self.carried += 1
        for pump in (self._pump_to_server(reader, line), self._pump_to_client(far_reader, line)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump_to_server(self, reader: asyncio.StreamReader, line: "_Line") -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                if line.is_broken:
                    continue
                self._check_statements(data, line)
                line.far.write(data)
                await line.far.drain()
        # The client has closed; a broken line does not tell the server.
        if line.is_broken:
            self._abandoned.append(line.far)
            line.near.transport.abort()
        else:
            line.abort()
        self._lines.discard(line)

    async def _pump_to_client(self, reader: asyncio.StreamReader, line: "_Line") -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                if line.is_broken:
                    continue
                if line.lost_answer is None:
                    line.near.write(data)
                    await line.near.drain()
                elif line.lost_answer.is_ready(data):
                    self.answers_lost += 1
                    self.broken += 1
                    if self._loses_silently:
                        line.is_broken = True
                    else:
                        line.reset()
        if not line.is_broken:
            line.abort()
            self._lines.discard(line)

    def _check_statements(self, data: bytes, line: "_Line") -> None:
        """Start to drop the answer if a statement matches."""
        for statement in line.client_side.statements(data):
            if self._to_lose and self._loses is not None and self._loses.search(statement):
                self._to_lose -= 1
                line.lost_answer = ServerSide()


class _Line:
    """One connection with both of its sides."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter, *, is_broken: bool) -> None:
        self.near = near
        self.far = far
        self.is_broken = is_broken
        self.client_side = ClientSide()
        self.lost_answer: ServerSide | None = None

    def abort(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()

    def reset(self) -> None:
        """Send a TCP reset to both sides."""
        for writer in (self.near, self.far):
            if not writer.transport.is_closing():  # the far side of a half-open line is closing
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()
