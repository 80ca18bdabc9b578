"""A way to the database that a test can break in every way that a network can: a proxy on 127.0.0.1.

The daemon is given its address. Counts what it carried and what it broke.
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
    """Carries bytes both ways from open() to close()."""

    def __init__(self, dsn: str) -> None:
        self._far = urlsplit(dsn)
        assert self._far.port is not None
        self._target = (self._far.hostname or "", self._far.port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._swallowing = False
        self._loses: re.Pattern[str] | None = None
        self._to_lose = 0
        self._lines: set[_Line] = set()
        self._abandoned: list[
            asyncio.StreamWriter
        ] = []  # the server's side of connections nobody ended there
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.carried = 0
        self.broken = 0
        self.answers_lost = 0

    async def open(self) -> None:
        """Take connections, after a cut at the same port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def dsn(self) -> str:
        """The database's address, by this way."""
        login = self._far.netloc.rpartition("@")[0]
        return self._far._replace(netloc=f"{login}@127.0.0.1:{self.port}").geturl()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._lines)

    def stall(self) -> None:
        """Connections stay, and carry nothing until `flow`."""
        self._flowing.clear()

    def blackhole(self) -> None:
        """Connections stay, new ones are taken, and every byte is lost, without a word to either side."""
        self._swallowing = True
        for line in self._lines:
            line.is_black = True
        self.broken += len(self._lines)

    def flow(self) -> None:
        """Carry on. What lost bytes stays black, for its stream has a hole; new connections are carried."""
        self._swallowing = False
        self._flowing.set()

    def half_open(self) -> None:
        """The server's side of each connection ends, and the client's is not told; new ones are carried."""
        for line in self._lines:
            line.is_black = True
            line.far.transport.abort()
        self.broken += len(self._lines)

    def reset(self) -> None:
        """Each connection ends with a TCP reset to both; new ones are carried."""
        self.broken += len(self._lines)
        for line in list(self._lines):
            line.reset()

    def lose_answers(self, statement: str, count: int) -> None:
        """Let the next so many statements that match be done, and lose the answer with its connection."""
        self._loses, self._to_lose = re.compile(statement), count

    @property
    def answers_to_lose(self) -> int:
        """Of those, how many are still to come."""
        return self._to_lose

    def cut(self) -> None:
        """No connection stays, and none is taken."""
        assert self._server is not None
        self._server.close()
        self.broken += len(self._lines)
        for line in self._lines:
            line.abort()

    async def close(self) -> None:
        """End it, at the end of a test."""
        self.cut()
        for writer in self._abandoned:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:  # the server is away, and this is how its client learns it
            writer.transport.abort()
            return
        line = _Line(writer, far_writer, is_black=self._swallowing)
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
                if line.is_black:
                    continue
                self._look_at(data, line)
                line.far.write(data)
                await line.far.drain()
        # The client has gone, which a line that carries nothing does not tell the server.
        if line.is_black:
            self._abandoned.append(line.far)
            line.near.transport.abort()
        else:
            line.abort()
        self._lines.discard(line)

    async def _pump_to_client(self, reader: asyncio.StreamReader, line: "_Line") -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                if line.is_black:
                    continue
                if line.lost_answer is None:
                    line.near.write(data)
                    await line.near.drain()
                elif line.lost_answer.is_ready(data):
                    self.answers_lost += 1
                    self.broken += 1
                    line.reset()
        if not line.is_black:
            line.abort()
            self._lines.discard(line)

    def _look_at(self, data: bytes, line: "_Line") -> None:
        """Begin to lose, if this is what is to be lost."""
        for statement in line.client_side.statements(data):
            if self._to_lose and self._loses is not None and self._loses.search(statement):
                self._to_lose -= 1
                line.lost_answer = ServerSide()


class _Line:
    """One connection: both its halves."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter, *, is_black: bool) -> None:
        self.near = near
        self.far = far
        self.is_black = is_black
        self.client_side = ClientSide()
        self.lost_answer: ServerSide | None = None

    def abort(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()

    def reset(self) -> None:
        """Both are told, and neither in order."""
        for writer in (self.near, self.far):
            if not writer.transport.is_closing():  # as the far one of a line that was half open
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()
