"""A way to the database that a test can cut or stall: a proxy on 127.0.0.1, which the daemon is given."""

import asyncio
import contextlib
from urllib.parse import urlsplit


class Wire:
    """Carries bytes both ways from open() to close()."""

    def __init__(self, dsn: str) -> None:
        self._far = urlsplit(dsn)
        assert self._far.port is not None
        self._target = (self._far.hostname or "", self._far.port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        """Take connections, after a cut at the same port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def dsn(self) -> str:
        """The database's address, by this way."""
        login = self._far.netloc.rpartition("@")[0]
        return self._far._replace(netloc=f"{login}@127.0.0.1:{self.port}").geturl()

    def stall(self) -> None:
        """Connections stay, and carry nothing."""
        self._flowing.clear()

    def flow(self) -> None:
        """Carry on."""
        self._flowing.set()

    def cut(self) -> None:
        """No connection stays, and none is taken."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """End it, at the end of a test."""
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, far_writer]
        for one, other in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(one, other))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
