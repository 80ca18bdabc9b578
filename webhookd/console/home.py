"""`/`: the status page, for an operator with a browser. Needs the scope of /status, whose words it shows."""

from collections.abc import Callable
from datetime import UTC, datetime

from aiohttp import web

from webhookd.console import status as status_page
from webhookd.http import health_responses, responses
from webhookd.http.pages.layout import page_response
from webhookd.http.routes import HTML, Route


class Home:
    """How this instance does, as a page."""

    def __init__(self, status: Callable[[], health_responses.Status]) -> None:
        self._status = status

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/",
                "read",
                self._get,
                "The status page",
                responses.Html,
                description="What /status says, for a browser.",
                media_type=HTML,
                asks_database=False,
            )
        ]

    async def _get(self, _: web.Request) -> web.Response:
        return page_response(status_page.render(self._status(), datetime.now(UTC)))
