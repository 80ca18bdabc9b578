"""Calls routes of the API from inside the process, with the rights of a session.

The console shows what the API answers. So a page cannot read or change anything that a token with the same
scopes and tenant could not, and every check of a request exists once.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from webhookd.console.sessions import Session
from webhookd.core.errors import Refused
from webhookd.http.auth import ACTOR, TENANT, TOKEN
from webhookd.http.responses import Problem, encoded, of_refusal
from webhookd.http.routes import JSON, Route

Value = TypeVar("Value")

_LINKS = ("/v1/tenants/{id}/portal-link", "/v1/console/login-link")
_ROTATION = "/v1/subscriptions/{id}/rotate-secret"


class ApiCalls:
    """The routes of the API, callable by method and template."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = {f"{route.method} {route.template}": route for route in routes}

    def scope_of(self, target: str) -> str | None:
        """Return the scope that a call needs."""
        return self._routes[target].scope

    async def call(
        self,
        outer: web.Request,
        session: Session,
        target: str,
        *,
        item_id: object = None,
        query: Mapping[str, object] | None = None,
        body: object = None,
    ) -> bytes:
        """Return the body of the response. `target` is a route as in "GET /v1/events/{id}".

        Raises a Problem for every response that is not a success, as the API would send it.
        """
        route = self._routes[target]
        _check(route, session)
        request = _InnerRequest(outer, route.method, item_id, query or {}, body)
        request[ACTOR], request[TENANT], request[TOKEN] = session.actor, session.tenant, session.token
        try:
            response = await route.handler(request)
        except Refused as refused:
            raise of_refusal(refused, of_query=route.method == "GET") from refused
        return cast("bytes", cast("web.Response", response).body or b"null")


def _check(route: Route, session: Session) -> None:
    if route.template == _ROTATION:
        # A portal link can allow it without other changes, or other changes without it.
        if not session.may_see_secrets:
            raise Problem(403, "forbidden", "this session may not see secrets, so it cannot rotate them")
    elif route.scope is not None and route.scope not in session.scopes:
        raise Problem(403, "forbidden", f"this needs the scope {route.scope}")
    if session.tenant is not None and not route.for_tenants:
        raise Problem(403, "forbidden", "this is not available for one tenant")
    if session.came_by_link and route.template in _LINKS:
        raise Problem(403, "forbidden", "a session from a link cannot make links")


def decoded(body: bytes, kind: type[Value]) -> Value:
    """Decode a response as a type that keeps what a page needs byte for byte, such as a payload."""
    return msgspec.json.decode(body, type=kind)


class _InnerRequest(web.Request):
    """A request that did not come over the network, for a handler of the API.

    It shares the connection of the page's request, which no handler with a complete body writes to.
    """

    def __init__(
        self,
        outer: web.Request,
        method: str,
        item_id: object,
        query: Mapping[str, object],
        body: object,
    ) -> None:
        loop = asyncio.get_running_loop()
        content = b"" if body is None else encoded(body)
        headers = CIMultiDict({"Host": outer.host})
        if body is not None:
            headers["Content-Type"] = JSON
            headers["Content-Length"] = str(len(content))
        url = URL.build(path="/", query={name: str(value) for name, value in query.items()})
        message = RawRequestMessage(
            method,
            str(url),
            outer.version,
            CIMultiDictProxy(headers),
            (),
            should_close=False,
            compression=None,
            upgrade=False,
            chunked=False,
            url=url,
        )
        payload = EMPTY_PAYLOAD
        if body is not None:
            # A buffer for all of it: a smaller one would stop the connection of the page's request.
            payload = StreamReader(outer.protocol, len(content), loop=loop)
            payload.feed_data(content)
            payload.feed_eof()
        task = cast("asyncio.Task[None]", asyncio.current_task())
        super().__init__(message, payload, outer.protocol, outer.writer, task, loop)
        self._path_values = {} if item_id is None else {"id": str(item_id)}

    @property
    def match_info(self) -> Any:
        """The values of the path; the routes use no more of aiohttp's match."""
        return self._path_values
