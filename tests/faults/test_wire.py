"""The wire: it breaks what it is told to break, and loses exactly the answer that it is told to lose."""

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
    """Give a way to the test's database, as its superuser."""
    wire = Wire(database.dsn("superuser"))
    await wire.open()
    yield wire
    await wire.close()


async def test_a_commit_is_done_and_its_answer_lost(database: Database, wire: Wire) -> None:
    """The statement that matches is committed, its connection ends; others are answered."""
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


@pytest.mark.parametrize("how", ["half_open", "blackhole"])
async def test_silence_is_not_told(how: str, wire: Wire) -> None:
    """The client's connection stays open and carries nothing; after the healing a new one is carried."""
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


async def test_a_reset_is_told_at_once(wire: Wire) -> None:
    """The client hears of it; a new connection is carried."""
    connection = await asyncpg.connect(wire.dsn)
    wire.reset()
    await until_true(connection.is_closed)
    again = await asyncpg.connect(wire.dsn)
    assert await again.fetchval("select 1") == 1
    await again.close()
    await asyncio.sleep(0)


def test_a_conversation_is_followed_through_any_pieces() -> None:
    """Byte by byte: a request for encryption, the login, a prepared statement and its use, a simple one."""
    said = bytes.fromhex("00000008 04d2162f 00000008 00030000".replace(" ", ""))
    said += (
        message(b"P", b"name\0select 1\0\0\0")
        + message(b"B", b"portal\0name\0rest")
        + message(b"Q", b"commit\0")
    )
    client = ClientSide()
    heard = [client.statements(said[place : place + 1]) for place in range(len(said))]
    assert [statement for statements in heard for statement in statements] == ["select 1", "commit"]


def test_an_answer_ends_with_readiness() -> None:
    """Not with a row in which the letter happens to be."""
    server = ServerSide()
    assert not server.is_ready(message(b"D", b"Z\0\0\0\5I"))
    assert not server.is_ready(message(b"Z", b"I")[:3])
    assert server.is_ready(message(b"Z", b"I")[3:])


def message(kind: bytes, body: bytes) -> bytes:
    """As the protocol has it."""
    return kind + (len(body) + 4).to_bytes(4, "big") + body
