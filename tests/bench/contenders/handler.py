"""The API's own handler of single events without a database: every event is accepted at once."""

import asyncio
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, cast

import uvloop

from webhookd.context import Context
from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.deliveries.api.events import Events
from webhookd.deliveries.ingest import Accepted, NewEvent
from webhookd.devtools.processes import answer_lines, child_options
from webhookd.http.server import Site, listening_socket
from webhookd.wakeups import WakeUps

if TYPE_CHECKING:
    from webhookd.db.pool import Pool
    from webhookd.deliveries.ingest import GroupCommit
    from webhookd.http.routes import QueryRunner


class NoCommit:
    """Replaces GroupCommit."""

    def __init__(self) -> None:
        self._ids = count(1)

    async def publish(self, _: NewEvent) -> Accepted:
        return Accepted(next(self._ids), datetime.now(UTC), duplicate=False)


async def main() -> None:
    """Serve until the input ends."""
    settings = Settings()
    context = Context(cast("Pool", None), WakeUps(), Metrics(), lambda: settings, "bench")
    # This benchmark never calls the routes that read, so they need no database.
    events = Events(context, cast("QueryRunner", None), cast("GroupCommit", NoCommit()))
    with listening_socket(f"127.0.0.1:{child_options()['port']}") as listening:
        serving = asyncio.create_task(Site(listening, lambda: settings, events.routes()).run())

        async def ignore(_: object) -> None:
            return None

        await answer_lines(ignore)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(main())
