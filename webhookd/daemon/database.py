"""The database of an instance: that of a DSN, or the embedded one, which runs as long as it is used."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from webhookd.core.errors import SchemaProblem
from webhookd.core.folders import data_dir
from webhookd.core.settings import Settings
from webhookd.db import migrations
from webhookd.embedded.server import EmbeddedServer, running

log = logging.getLogger(__name__)

KEEP_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True)
class Database:
    """How to log in: to run, and to migrate."""

    dsn: str
    migrating_dsn: str
    embedded: EmbeddedServer | None = None

    async def fit(self, *, may_migrate: bool) -> None:
        """Bring the schema up to date and tell, or refuse it with the command to run."""
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
                "PostgreSQL %s runs in %s",
                server.version,
                server.folder,
                extra={
                    "joined": None if server.started else "it ran already",
                    "migrated": missing or None,
                    "look_inside": f"psql '{server.admin_dsn}'",
                },
            )
        elif pending:
            log.info("the database was migrated", extra={"migrated": missing})


async def keep(server: EmbeddedServer) -> None:
    """See that the embedded server runs. A supervised service."""
    loop = asyncio.get_running_loop()
    while True:
        kept = loop.run_in_executor(None, server.ensure_running)
        try:
            await asyncio.shield(kept)
        except asyncio.CancelledError:
            # Its thread is waited for, a server must not be started behind the back of who stops it; but not
            # for a recovery that may take minutes.
            server.shut_down()
            await asyncio.wait([kept])
            raise
        await asyncio.sleep(KEEP_INTERVAL_SECONDS)


@contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    """The database that the settings mean, for the length of the block."""
    dsn = settings.database.dsn
    if dsn:
        yield Database(dsn, dsn)
        return
    with running(data_dir(settings)) as server:
        yield Database(server.dsn, server.admin_dsn, server)
