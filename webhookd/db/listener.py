"""Hears other processes' wake-ups, on a connection of its own.

A connection that is cut off hears nothing and says nothing: so it is asked, every few seconds and with a
deadline, whether it still listens. Where LISTEN does not work (behind PgBouncer in transaction mode) the
daemon lives on polling alone, and this says so once.
"""

import asyncio
import logging

from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.connection import Connection, connected
from webhookd.db.errors import translated
from webhookd.db.pool import Pool
from webhookd.wakeups import Bells, Work

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_SECONDS = 3.0
HEARTBEAT_TIMEOUT_SECONDS = 3.0
# Behind a pooler LISTEN is forgotten with its transaction: looked for again now and then, not at every beat.
DEAF_INTERVAL_SECONDS = 60.0


class Listener:
    """Listens until it is cancelled."""

    def __init__(self, dsn: str, pool: Pool, bells: Bells) -> None:
        self._dsn = dsn
        self._pool = pool
        self._bells = bells
        self._deaf_said = False

    async def run(self) -> None:
        """Listen; a lost connection ends this with an error, and the supervisor begins it anew."""
        while True:
            try:
                await self._listen()
            except DatabaseUnavailable as error:
                # Its heartbeat notices a stalled server before a use of the pool has run into its timeout.
                self._pool.report_unavailable(error)
                raise
            if not self._deaf_said:
                self._deaf_said = True
                log.warning("LISTEN has no effect here: a pooler? Wake-ups come by polling alone")
            await asyncio.sleep(DEAF_INTERVAL_SECONDS)

    async def _listen(self) -> None:
        """Until the connection is lost, or turns out to be deaf."""
        async with connected(self._dsn) as connection:
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_SECONDS):
                for work in Work:
                    await connection.add_listener(work.value, self._heard)
            # What was rung while nobody listened is looked for, now that somebody does.
            self._bells.ring_all_here()
            while await self._still_listens(connection):  # noqa: ASYNC110  it is the server that is asked
                await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)

    async def _still_listens(self, connection: Connection) -> bool:
        with translated():
            try:
                channels = await asyncio.wait_for(
                    connection.fetchval("select array(select pg_listening_channels())"),
                    HEARTBEAT_TIMEOUT_SECONDS,
                )
            except TimeoutError as error:
                raise DatabaseUnavailable("the listener's connection does not answer") from error
        return set(channels) >= {work.value for work in Work}

    def _heard(self, _: object, process_id: int, channel: str, __: object) -> None:
        # Our own wake-ups were rung in memory.
        if not self._pool.has_process(process_id):
            self._bells.hear(Work(channel))
