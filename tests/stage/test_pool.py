"""What the pool makes of the database's answers."""

import pytest

from tests.stage.conftest import Parts
from webhookd.model.errors import DatabaseFull, DatabaseUnavailable
from webhookd.store import pool as pool_module


async def ask(parts: Parts) -> None:
    """Use it, for something that needs no room."""
    async with parts.pool.connection() as connection:
        await connection.execute("select 1")


async def test_an_answer_says_that_the_database_is_back(parts: Parts) -> None:
    """It had been away."""
    parts.pool.lost(DatabaseUnavailable("away"))
    assert not parts.pool.available
    await ask(parts)
    assert parts.pool.available


async def test_an_answer_does_not_say_that_there_is_room(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full database serves readers: it is ready when nobody was refused for a while."""
    parts.pool.lost(DatabaseFull("no space left on device"))
    await ask(parts)
    assert not parts.pool.available
    monkeypatch.setattr(pool_module, "FULL_SECONDS", 0)
    parts.pool.lost(DatabaseFull("no space left on device"))
    await ask(parts)
    assert parts.pool.available
