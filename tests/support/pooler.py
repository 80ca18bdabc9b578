"""Poolers in transaction mode between a daemon and its database.

RotatingPooler runs everywhere and is stricter than a real pooler: it gives each transaction the server
connection that was used least recently, so any dependency on session state fails at once. PgBouncer is the
real program, if it is installed.
"""

import asyncio
import contextlib
import itertools
import shutil
import struct
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

from tests.support.postgres import end_process, free_port, make_folder
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS
from webhookd.embedded.installation import restrict_to, server_account, start_program

if TYPE_CHECKING:
    import subprocess

NEGOTIATIONS = (80877103, 80877104)  # SSLRequest, GSSENCRequest
CANCEL_REQUEST = 80877102
# Like PgBouncer: other startup parameters are refused.
KNOWN_PARAMETERS = {b"user", b"database", b"client_encoding", b"application_name"}
# The kinds of AuthenticationRequest that a client must answer.
ANSWERED = (3, 5, 10, 11)


class Pooler(ABC):
    """Listens inside `async with`; accepts the same logins as its server."""

    def __init__(self, dsn: str) -> None:
        self._server = urlsplit(dsn)
        self.port = 0

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @property
    def dsn(self) -> str:
        """The DSN of the same login and database through the pooler."""
        login = self._server.netloc.rpartition("@")[0]
        return self._server._replace(netloc=f"{login}@127.0.0.1:{self.port}").geturl()


@dataclass
class _Stream:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes = b""  # of a server connection: cancels its statement

    async def read(self) -> tuple[bytes, bytes]:
        kind = await self.reader.readexactly(1)
        size = await self.reader.readexactly(4)
        return kind, await self.reader.readexactly(int.from_bytes(size) - 4)

    async def write(self, kind: bytes, body: bytes) -> None:
        self.writer.write(kind + (len(body) + 4).to_bytes(4) + body)
        await self.writer.drain()


class RotatingPooler(Pooler):
    """Each client logs in on a new server connection, which is then shared by all clients."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.transactions = 0
        self._servers: list[_Stream] = []  # including those that a client left in a transaction
        self._idle: deque[_Stream] = deque()
        self._returned = asyncio.Condition()
        self._keys = itertools.count(1)
        self._serving: dict[bytes, _Stream] = {}
        self._handlers: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        for server in self._servers:
            server.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        client = _Stream(reader, writer)
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            if (startup := await self._startup(client)) is not None:
                key = struct.pack("!II", next(self._keys), 0)
                await self._log_in(client, startup, key)
                while True:
                    kind, body = await client.read()
                    if kind == b"X":
                        break
                    await self._transact(client, key, kind, body)
        writer.close()

    async def _startup(self, client: _Stream) -> bytes | None:
        while True:
            size = int.from_bytes(await client.reader.readexactly(4))
            packet = await client.reader.readexactly(size - 4)
            code = int.from_bytes(packet[:4])
            if code in NEGOTIATIONS:
                client.writer.write(b"N")
            elif code == CANCEL_REQUEST:
                await self._cancel(packet[4:])
                return None
            else:
                break
        words = packet[4:].rstrip(b"\0").split(b"\0")
        if unknown := set(words[::2]) - KNOWN_PARAMETERS:
            message = b"unsupported startup parameter: " + min(unknown)
            await client.write(b"E", b"SFATAL\0C08P01\0M" + message + b"\0\0")
            return None
        return packet

    async def _connect(self) -> _Stream:
        assert self._server.hostname is not None
        server = _Stream(*await asyncio.open_connection(self._server.hostname, self._server.port or 5432))
        self._servers.append(server)
        return server

    async def _log_in(self, client: _Stream, startup: bytes, key: bytes) -> None:
        server = await self._connect()
        server.writer.write((len(startup) + 4).to_bytes(4) + startup)
        while True:
            kind, body = await server.read()
            if kind == b"K":
                server.key, body = body, key
            await client.write(kind, body)
            if kind == b"R" and int.from_bytes(body[:4]) in ANSWERED:
                await server.write(*await client.read())
            elif kind == b"Z":
                return await self._give_back(server)

    async def _transact(self, client: _Stream, key: bytes, kind: bytes, body: bytes) -> None:
        """Forward messages until the server reports that it is outside of a transaction."""
        async with self._returned:
            await self._returned.wait_for(lambda: self._idle)
            server = self._serving[key] = self._idle.popleft()
        self.transactions += 1
        await server.write(kind, body)
        forwarding = asyncio.ensure_future(self._pump(client, server))
        try:
            while (message := await server.read()) != (b"Z", b"I"):
                await client.write(*message)
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)
            del self._serving[key]
        await self._give_back(server)
        await client.write(*message)

    async def _pump(self, client: _Stream, server: _Stream) -> None:
        while True:
            await server.write(*await client.read())

    async def _give_back(self, server: _Stream) -> None:
        async with self._returned:
            self._idle.append(server)
            self._returned.notify()

    async def _cancel(self, key: bytes) -> None:
        if serving := self._serving.get(key):
            other = await self._connect()
            other.writer.write(struct.pack("!II", 16, CANCEL_REQUEST) + serving.key)
            await other.writer.drain()
            other.writer.close()


class PgBouncer(Pooler):
    """The real program, as a child process."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self._account = server_account()
        self._folder = make_folder(self._account)
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return PgBouncer.program() is not None

    @staticmethod
    def program() -> str | None:
        """Find the program; Debian installs it in a folder that is only in root's PATH."""
        return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")

    async def __aenter__(self) -> Self:
        self.port = free_port()
        users = self._write("users", f'"{self._server.username}" "{unquote(self._server.password or "")}"\n')
        config = self._write(
            "pgbouncer.ini",
            f"""[databases]
* = host={self._server.hostname} port={self._server.port or 5432}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = transaction
default_pool_size = 3
""",
        )
        program = self.program()
        assert program is not None
        with (self._folder / "log").open("ab") as log:
            self._process = start_program([program, str(config)], self._account, self._folder, log.fileno())
        await self._until_it_listens()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        end_process(self._process)
        shutil.rmtree(self._folder)

    def _write(self, name: str, text: str) -> Path:
        path = self._folder / name
        path.write_text(text)
        restrict_to(path, self._account)
        return path

    async def _until_it_listens(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONDITION_TIMEOUT_SECONDS
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            if loop.time() > deadline:
                raise AssertionError((self._folder / "log").read_text())
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
