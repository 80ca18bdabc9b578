"""/openapi.json: the document of all routes, made once at the start.

Open to all, as health is: it tells nothing of an instance but its version, which every delivery tells too;
and what makes clients of it has no token yet.
"""

from collections.abc import Sequence

from aiohttp import web

from webhookd.api import openapi, responses
from webhookd.api.answers import SERVER, encoded
from webhookd.api.routes import JSON, Route


class Documents:
    """What the API says of itself."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._document = encoded(openapi.document([*routes, *self.routes()]))

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/openapi.json",
                None,
                self._openapi,
                "This document",
                responses.Document,
                asks_database=False,
            ),
        ]

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type=JSON, headers=SERVER)
