"""The database of a bench: on the server that the settings mean, with a name of its own, dropped at the end.

The database that the settings name is logged in to, to make and drop the other; nothing in it is touched.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import click
import msgspec

from webhookd.core.configuration import data_dir
from webhookd.core.dsn import with_database
from webhookd.core.errors import DatabaseUnavailable, SchemaProblem, WebhookdError
from webhookd.core.settings import Settings
from webhookd.daemon.database import Database, opened
from webhookd.db import migrations
from webhookd.db import server_facts as facts
from webhookd.devtools import bench_queries as bench
from webhookd.devtools.bench_progress import Course
from webhookd.devtools.temporary_daemon import temporary_folder
from webhookd.embedded.folder import is_new

# Of the bench itself, beside the daemon's: its pool, and one to make and drop the database.
OWN_CONNECTIONS = 3


class OwnDatabase(NamedTuple):
    """How the daemon logs in, and what its server is like."""

    dsn: str
    facts: facts.Facts


@contextmanager
def server(settings: Settings, course: Course) -> Iterator[Database]:
    """The server that the settings mean; where the embedded one was never made, one that is gone after."""
    if settings.database.embedded and is_new(folder := data_dir(settings)):
        course.say("Starting PostgreSQL")
        # On the same disk: that is what is measured, and the temporary folder may be in memory.
        there = next(it for it in folder.parents if it.is_dir())
        with (
            temporary_folder("webhookd-bench-", there) as made,
            opened(_in_folder(settings, made / "data")) as database,
        ):
            yield database
        return
    if settings.database.embedded:
        course.say("Starting PostgreSQL, unless it runs")
    with opened(settings) as database:
        yield database


def _in_folder(settings: Settings, folder: Path) -> Settings:
    database = msgspec.structs.replace(settings.database, data_dir=str(folder))
    return msgspec.structs.replace(settings, database=database)


def require_fit(found: bench.Server, told: facts.Facts, pool_size: int) -> None:
    """Refuse what could not be made, or would take from others what they need."""
    lacking = [
        right
        for right, there in (("CREATEDB", found.may_create), ("CREATEROLE", found.may_migrate))
        if not there
    ]
    if lacking:
        raise SchemaProblem(
            f"bench makes a database of its own, and the login {found.login} may not: give it the right"
            f" (ALTER ROLE {found.login} {' '.join(lacking)}), or set WEBHOOKD_DATABASE_DSN to a login that"
            " migrates and has CREATEDB"
        )
    needed, left = pool_size + 1 + OWN_CONNECTIONS, told.connections - told.connections_in_use
    if not told.pooled and needed > left:
        raise WebhookdError(
            f"bench needs {needed} connections, and the server has {max(left, 0)} of {told.connections} left"
        )


@asynccontextmanager
async def own_database(database: Database, tablespace: str | None) -> AsyncIterator[OwnDatabase]:
    """Make it and migrate it; drop it, whatever happens."""
    name = bench.new_name()
    try:
        with anyio.CancelScope(shield=True):
            # To its end: a server that is cut off in the middle may make it after our drop.
            await bench.create(database.migrating_dsn, name, tablespace)
        dsn = with_database(database.dsn, name)
        try:
            await migrations.migrate(with_database(database.migrating_dsn, name))
            told = await facts.fetch(dsn)
        except DatabaseUnavailable as error:
            if (await facts.fetch(database.dsn)).pooled:
                raise DatabaseUnavailable(
                    f"{error} (behind a pooler: name the server itself in WEBHOOKD_DATABASE_DSN)"
                ) from error
            raise
        if told.functions_missing:
            raise SchemaProblem(f"{told.login} lacks rights: GRANT webhookd_app TO {told.login}")
        yield OwnDatabase(dsn, told)
    finally:
        with anyio.CancelScope(shield=True):
            await _drop(database, name)


async def _drop(database: Database, name: str) -> None:
    """What made us end is the error to tell; that this failed too is said beside it."""
    try:
        await bench.drop(database.migrating_dsn, name, even_if_used=True)
    except WebhookdError as error:
        click.echo(f"webhookd: the database {name} is left: {error}. {removal([name])}", err=True)


def removal(names: list[str]) -> str:
    """How to get rid of them."""
    statements = " ".join(f"DROP DATABASE {name};" for name in names)
    return f"Remove with `webhookd bench --clean`, or in psql: {statements}"


async def clean(database: Database) -> list[str]:
    """Drop what killed runs left; a database that somebody uses is none. The names."""
    found = await bench.look(database.migrating_dsn)
    for name in found.left_over:
        await bench.drop(database.migrating_dsn, name, even_if_used=False)
    return found.left_over
