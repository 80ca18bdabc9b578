"""The database proxy: it breaks connections as requested, and drops exactly the requested answer."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.support.conversation import ClientSide, ServerSide
from tests.support.database import Database
from tests.support.waiting import until_true
from tests.support.wire import Wire

INSERT = "insert into public.seen values ($1)"


@pytest.fixture
async def wire(database: Database) -> AsyncIterator[Wire]:
    """Provide a proxy to the test's database, with the superuser's login."""
    wire = Wire(database.dsn("superuser"))
    await wire.open()
    yield wire
    await wire.close()


async def test_lost_answer_of_a_commit(database: Database, wire: Wire) -> None:
    """The matching statement is committed and its connection is reset; other statements get answers."""
    superuser = await database.connect("superuser")
    await superuser.execute("create table public.seen (number integer)")
    connection = await asyncpg.connect(wire.dsn)
    await connection.execute(INSERT, 1)
    wire.lose_answers("insert into", 1)
    assert await connection.fetchval("select 2") == 2
    with pytest.raises(asyncpg.ConnectionDoesNotExistError):
        await connection.execute(INSERT, 3)
    assert [row[0] for row in await superuser.fetch("select number from public.seen")] == [1, 3]
    assert (wire.answers_lost, wire.answers_to_lose, wire.broken) == (1, 0, 1)
    again = await asyncpg.connect(wire.dsn)
    await again.execute(INSERT, 4)
    await again.close()


async def test_answer_of_a_commit_lost_in_silence(database: Database, wire: Wire) -> None:
    """The matching statement is committed, and its client waits; other connections work."""
    superuser = await database.connect("superuser")
    await superuser.execute("create table public.seen (number integer)")
    connection, other = await asyncpg.connect(wire.dsn), await asyncpg.connect(wire.dsn)
    wire.lose_answers("insert into", 1, silently=True)
    waiting = asyncio.create_task(connection.execute(INSERT, 1))
    await until_true(lambda: wire.answers_lost == 1)
    assert await superuser.fetchval("select number from public.seen") == 1
    assert await other.fetchval("select 2") == 2
    assert not waiting.done()
    wire.reset()
    with pytest.raises(asyncpg.ConnectionDoesNotExistError):
        await waiting
    assert wire.answers_to_lose == 0


@pytest.mark.parametrize("how", ["half_open", "blackhole"])
async def test_silent_connection_stays_open(how: str, wire: Wire) -> None:
    """The client's connection stays open without answers; after `flow`, new connections work."""
    connection = await asyncpg.connect(wire.dsn)
    getattr(wire, how)()
    with pytest.raises(TimeoutError):
        await connection.fetchval("select 1", timeout=0.2)
    assert not connection.is_closed()
    connection.terminate()
    wire.flow()
    again = await asyncpg.connect(wire.dsn)
    assert await again.fetchval("select 1") == 1
    await again.close()


async def test_reset_closes_the_connection_at_once(wire: Wire) -> None:
    """The client notices the reset; new connections work."""
    connection = await asyncpg.connect(wire.dsn)
    wire.reset()
    await until_true(connection.is_closed)
    again = await asyncpg.connect(wire.dsn)
    assert await again.fetchval("select 1") == 1
    await again.close()
    await asyncio.sleep(0)


def test_statements_are_parsed_byte_by_byte() -> None:
    """Parse an SSL request, the login, a prepared statement with its use, and a simple query."""
    sent = bytes.fromhex("00000008 04d2162f 00000008 00030000".replace(" ", ""))
    sent += (
        message(b"P", b"name\0select 1\0\0\0")
        + message(b"B", b"portal\0name\0rest")
        + message(b"Q", b"commit\0")
    )
    client = ClientSide()
    parsed = [client.statements(sent[place : place + 1]) for place in range(len(sent))]
    assert [statement for statements in parsed for statement in statements] == ["select 1", "commit"]


def test_answer_ends_with_ready_for_query() -> None:
    """A data row that contains the letter Z does not end the answer."""
    server = ServerSide()
    assert not server.is_ready(message(b"D", b"Z\0\0\0\5I"))
    assert not server.is_ready(message(b"Z", b"I")[:3])
    assert server.is_ready(message(b"Z", b"I")[3:])


def message(kind: bytes, body: bytes) -> bytes:
    """Encode a message of the PostgreSQL protocol."""
    return kind + (len(body) + 4).to_bytes(4, "big") + body
