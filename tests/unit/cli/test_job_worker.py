"""The claims of `jobs work` when a signal stops the worker: against a real connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from webhookd.cli.client import Client, Place
from webhookd.jobqueue.cli.work import CommandWorker, WorkOptions

OPTIONS = WorkOptions("report.build", "DOT", "holder", 1, 60.0, once=False, command=["true"])
JOB = b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}'


@asynccontextmanager
async def claiming_from(
    answer: Callable[[CommandWorker, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[CommandWorker]:
    """A worker whose claims `answer` receives."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
        await reader.readexactly(int(length.split()[1]))
        await answer(worker, reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(20):
        port = server.sockets[0].getsockname()[1]
        worker = CommandWorker(Client(Place(urlsplit(f"http://127.0.0.1:{port}"), "the test")), OPTIONS)
        yield worker


async def test_stop_closes_the_connection_of_a_waiting_claim() -> None:
    """The daemon sees that the worker has gone, and assigns it no job."""
    closed = asyncio.Event()

    async def answer(worker: CommandWorker, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        worker._stopping.set()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        closed.set()

    async with claiming_from(answer) as worker:
        assert await worker._claim_unless_stopping() is None
        await closed.wait()


async def test_job_that_arrives_as_the_worker_stops_is_used() -> None:
    """It is leased already, and would otherwise wait for the end of its lease."""

    async def answer(worker: CommandWorker, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(JOB)
        worker._stopping.set()

    async with claiming_from(answer) as worker:
        claimed = await worker._claim_unless_stopping()
        assert worker._stopping.is_set()
    assert claimed is not None
    assert claimed.value == {"a": 1}
