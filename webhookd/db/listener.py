"""Listens for NOTIFY from other processes, on a connection of its own.

A connection that is cut off receives nothing and reports nothing. So it is checked every few seconds, with a
timeout, whether it still listens. Where LISTEN does not work (behind PgBouncer in transaction mode) the
daemon relies on polling, and logs that once.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.connection import Connection, connected, translated
from webhookd.db.pool import Pool

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_SECONDS = 3.0
HEARTBEAT_TIMEOUT_SECONDS = 3.0
# Behind a pooler, LISTEN ends with its transaction: try again now and then, not at every heartbeat.
NO_LISTEN_INTERVAL_SECONDS = 60.0


class Listener:
    """Listens on some channels until it is cancelled."""

    def __init__(
        self,
        dsn: str,
        pool: Pool,
        channels: Collection[str],
        *,
        on_listening: Callable[[], None],
        on_notify: Callable[[str], None],
    ) -> None:
        self._dsn = dsn
        self._pool = pool
        self._channels = channels
        self._on_listening = on_listening
        self._on_notify = on_notify
        self._has_warned = False

    async def run(self) -> None:
        """Listen; a lost connection raises, and the supervisor restarts this service."""
        while True:
            try:
                await self._listen()
            except DatabaseUnavailable as error:
                # The heartbeat notices a stalled server before a call through the pool runs into its timeout.
                self._pool.report_unavailable(error)
                raise
            if not self._has_warned:
                self._has_warned = True
                log.warning("LISTEN has no effect on this connection (is it pooled?): relying on polling")
            await asyncio.sleep(NO_LISTEN_INTERVAL_SECONDS)

    async def _listen(self) -> None:
        """Listen until the connection is lost, or turns out not to listen."""
        async with connected(self._dsn) as connection:
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_SECONDS):
                for channel in self._channels:
                    await connection.add_listener(channel, self._notified)
            # Notifications sent before this point were missed.
            self._on_listening()
            while await self._still_listens(connection):  # noqa: ASYNC110  the server is polled, not a variable
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
        return set(channels) >= set(self._channels)

    def _notified(self, _: object, process_id: int, channel: str, __: object) -> None:
        # Wake-ups from this process were delivered through memory.
        if not self._pool.has_process(process_id):
            self._on_notify(channel)
