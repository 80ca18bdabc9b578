"""The first page: how deliveries are doing now, and what needs attention."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from aiohttp import web

from webhookd.console.names import Names, endpoint_names
from webhookd.console.visits import Pages, Visit, page
from webhookd.core.errors import DatabaseUnavailable
from webhookd.core.settings import SERVICES
from webhookd.http.health import InstanceStatus
from webhookd.http.responses import encoded

log = logging.getLogger(__name__)

REFRESH_SECONDS = 10
RECENT_DEAD_LETTERS = 5
# The chart's time span by its name in the address, in seconds.
SPANS = {"1h": 3600, "24h": 86_400, "7d": 7 * 86_400}
# What waits at a stage, in words that need no design document.
STAGES = {
    "routing": ("Events to route", "The router creates their deliveries."),
    "orchestration": ("Deliveries to start", "They are due for their first attempt or for a retry."),
    "delivery": ("Attempts to send", "They wait for a worker with a free place."),
    "results": ("Results to apply", "The endpoint answered; the delivery is not updated yet."),
    "retry": ("Retries for later", "They failed and wait for the next attempt."),
    "held": ("Held deliveries", "Their endpoint is paused, disabled or not verified."),
}
ACTIVE_STAGES = ("routing", "orchestration", "delivery", "results")


class OverviewPages(Pages):
    """The overview."""

    def __init__(self, status: Callable[[], InstanceStatus]) -> None:
        self._status = status

    @page("GET /", "read")
    async def overview(self, visit: Visit) -> web.StreamResponse:
        """Show the overview. It is useful too while the database does not answer."""
        status: dict[str, Any] = msgspec.json.decode(encoded(self._status()))
        span = visit.request.query.get("span", "1h")
        if span not in SPANS:
            span = "1h"
        stats, letters, names = None, None, Names()
        try:
            since = datetime.now(UTC) - timedelta(seconds=SPANS[span])
            stats = await visit.get("/v1/stats", since=since.isoformat())
            letters = (await visit.get("/v1/dead-letters", limit=RECENT_DEAD_LETTERS))["items"]
            names = await endpoint_names(visit, (letter["subscription_id"] for letter in letters))
        except DatabaseUnavailable as error:
            log.warning("the overview has no statistics, database unavailable: %s", error)
        return visit.render(
            "overview.html",
            status=status,
            stats=stats,
            dead_letters=letters,
            names=names,
            span=span,
            spans=list(SPANS),
            stages=STAGES,
            oldest_at=_oldest(status["backlog"]),
            services=[
                service
                for service in status["services"]
                if service["name"] in SERVICES or service["state"] == "failing" or service["restarts"]
            ],
            reloads=visit.request.query.get("reload") == "1",
            refresh_seconds=REFRESH_SECONDS,
        )


def _oldest(backlog: dict[str, Any] | None) -> str | None:
    """Return since when the oldest delivery waits that could be sent now."""
    stages = backlog["stages"] if backlog else []
    times = [stage["oldest_at"] for stage in stages if stage["stage"] in ACTIVE_STAGES and stage["oldest_at"]]
    return min(times, default=None)
