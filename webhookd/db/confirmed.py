"""Connections on which "committed" means committed everywhere that commits wait for.

Who cancels a wait for a synchronous standby has the server answer that all is well, with a warning beside it:
committed here, perhaps not there. After a failover that is gone. So the warning is an error of ours: the
outcome is not known, nobody is told that it is stored, and nothing that was leased is sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import asyncpg

from webhookd.core.errors import DatabaseUnavailable

# Where the warning comes from. Its text is in the server's language, and it has no SQLSTATE of its own.
_WAIT_FOR_STANDBY = "SyncRepWaitForLSN"


class ConfirmedConnection(asyncpg.Connection):
    """The driver's, whose every call listens for the warning."""

    async def execute(self, *arguments: Any, **options: Any) -> str:
        with self._confirmed():
            return await super().execute(*arguments, **options)

    async def fetch(self, *arguments: Any, **options: Any) -> Any:
        with self._confirmed():
            return await super().fetch(*arguments, **options)

    async def fetchrow(self, *arguments: Any, **options: Any) -> Any:
        with self._confirmed():
            return await super().fetchrow(*arguments, **options)

    async def fetchval(self, *arguments: Any, **options: Any) -> Any:
        with self._confirmed():
            return await super().fetchval(*arguments, **options)

    async def close(self, **options: Any) -> None:
        """Also where the server does not take leave: then the driver has cut it off, and that is closed, too.

        It closes old ones in tasks that nobody asks for their end.
        """
        with suppress(TimeoutError, OSError):
            await super().close(**options)

    @contextmanager
    def _confirmed(self) -> Iterator[None]:
        # The driver calls listeners before it wakes who waits for the answer.
        unconfirmed = False

        def heard(_: object, message: Any) -> None:
            nonlocal unconfirmed
            unconfirmed |= message.server_source_function == _WAIT_FOR_STANDBY

        self.add_log_listener(heard)
        try:
            yield
        finally:
            self.remove_log_listener(heard)
        if unconfirmed:
            raise DatabaseUnavailable(
                "database unavailable: the wait for the standby was cancelled, which may not have the commit"
            )
