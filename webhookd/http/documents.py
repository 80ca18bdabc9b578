"""/openapi.json, the document of all routes; and /docs, to read it. Made once, at the start.

Open to all, as health is: it tells nothing of an instance but its version, which every delivery tells too;
and what makes clients of it has no token yet.
"""

from collections.abc import Sequence

from aiohttp import web

from webhookd.http import openapi, responses
from webhookd.http.answers import HEADERS, encoded
from webhookd.http.pages import docs
from webhookd.http.pages.layout import page_response
from webhookd.http.routes import HTML, JSON, Route


class Documents:
    """What the API says of itself."""

    def __init__(self, routes: Sequence[Route]) -> None:
        document = openapi.document([*routes, *self.routes()])
        self._document = encoded(document)
        self._page = docs.render(document)

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
            Route(
                "GET",
                "/docs",
                None,
                self._docs,
                "The page that you may be reading",
                responses.Html,
                media_type=HTML,
                asks_database=False,
            ),
        ]

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type=JSON, headers=HEADERS)

    async def _docs(self, request: web.Request) -> web.Response:
        # As a proxy in front says, which has the TLS: no command here should send a token without it.
        scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else request.scheme
        return page_response(docs.served_from(self._page, scheme, request.host))
