"""The database of an instance: the configured one, or the embedded server, which runs while it is in use."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from webhookd.core.configuration import data_dir
from webhookd.core.errors import SchemaProblem
from webhookd.core.settings import Settings
from webhookd.db import migrations
from webhookd.embedded.server import EmbeddedServer, running

log = logging.getLogger(__name__)

KEEP_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True)
class Database:
    """Connection strings of an instance: to run, and to migrate."""

    dsn: str
    migrating_dsn: str
    embedded: EmbeddedServer | None = None

    async def fit(self, *, may_migrate: bool) -> None:
        """Migrate the schema if allowed; otherwise refuse an outdated one and name the command to run."""
        pending = await migrations.check(self.migrating_dsn)
        missing = ", ".join(pending.describe())
        if pending and not may_migrate:
            raise SchemaProblem(
                f"the database's schema is not up to date ({missing}): run `webhookd migrate`"
            )
        if pending:
            await migrations.migrate(self.migrating_dsn)
        if server := self.embedded:
            log.info(
                "embedded PostgreSQL %s is running in %s",
                server.version,
                server.folder,
                extra={
                    "joined": None if server.started else "already running",
                    "migrated": missing or None,
                    "connect_with": f"psql '{server.admin_dsn}'",
                },
            )
        elif pending:
            log.info("database migrated", extra={"migrated": missing})


async def keep_running(server: EmbeddedServer) -> None:
    """Restart the embedded server if it stops. A supervised service."""
    loop = asyncio.get_running_loop()
    while True:
        kept = loop.run_in_executor(None, server.ensure_running)
        try:
            await asyncio.shield(kept)
        except asyncio.CancelledError:
            # Wait for the thread, or it could start a server that the shutdown has just stopped.
            # shut_down() keeps that wait short: a recovery may take minutes.
            server.shut_down()
            await asyncio.wait([kept])
            raise
        await asyncio.sleep(KEEP_INTERVAL_SECONDS)


@contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    """Open the configured database for the length of the block."""
    dsn = settings.database.dsn
    if dsn:
        yield Database(dsn, dsn)
        return
    with running(data_dir(settings)) as server:
        yield Database(server.dsn, server.admin_dsn, server)
