"""The live page: attempts as they happen, sent as server-sent events by the hub of activity.py.

Without JavaScript it is a list, which the browser reloads if the visitor wants that.
"""

import asyncio
import time

from aiohttp import web

from webhookd.console.activity import HEARTBEAT, ActivityHub, Client, Selection, shown
from webhookd.console.lists import UNPROCESSABLE, Filters, found_or_error, list_query
from webhookd.console.visits import Pages, Visit, page
from webhookd.http.responses import Problem
from webhookd.http.server import connection_cap

EVENT_STREAM = "text/event-stream"
REFRESH_SECONDS = 5
# A comment keeps proxies from closing a silent connection, and shows whether the client is still there. The
# session is checked as often.
HEARTBEAT_SECONDS = 15.0
# The browser connects again, and continues where it was.
MAX_STREAM_SECONDS = 3600.0
RECONNECT_MILLISECONDS = 3000
# A client that reads nothing for this long is disconnected.
WRITE_TIMEOUT_SECONDS = 30.0
_FILTERS = ("status", "event_type", "subscription_id", "tenant")
_HEADERS = {
    # nginx would collect the events otherwise.
    "X-Accel-Buffering": "no",
    "Content-Type": f"{EVENT_STREAM}; charset=utf-8",
}


class LivePages(Pages):
    """The live page and its stream."""

    def __init__(self, hub: ActivityHub) -> None:
        self._hub = hub

    @page("GET /live", "read")
    async def live(self, visit: Visit) -> web.StreamResponse:
        """Show the newest attempts."""
        query = _filters(visit)
        found, error = await found_or_error(visit, "/v1/attempts", query)
        return visit.render(
            "live.html",
            UNPROCESSABLE if error else 200,
            query=query,
            error=error,
            reloads=visit.request.query.get("reload") == "1",
            attempts=[shown(row) for row in found["items"]],
            refresh_seconds=REFRESH_SECONDS,
        )

    @page("GET /live/stream", "read")
    async def stream(self, visit: Visit) -> web.StreamResponse:
        """Send the activity until the client goes, the session ends, or an hour has passed."""
        request = visit.request
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            # It could not read the stream, but would use up one of the few places.
            raise Problem(403, "foreign_page", "a page of another site asked for this stream")
        query = _filters(visit)
        await visit.get("/v1/attempts", limit=1, **query)  # refuses filters that are not valid
        # A browser sends the header by itself; the script sends the parameter when it connects again.
        last_id = request.headers.get("Last-Event-ID") or request.query.get("last_event_id", "")
        async with self._hub.client(
            _selection(visit, query),
            visit.session.id,
            last_id,
            # The API needs most of the connections that this instance can have.
            connection_cap(visit.settings) // 2,
            is_gone=lambda: request.transport is None or request.transport.is_closing(),
        ) as client:
            response = web.StreamResponse(headers={**visit.page_headers, **_HEADERS})
            await response.prepare(request)
            try:
                await _send(visit, client, response)
            except (ConnectionError, TimeoutError):
                # It is gone, or does not read: what it has not read is of no use.
                if request.transport is not None:
                    request.transport.abort()
        return response


async def _send(visit: Visit, client: Client, response: web.StreamResponse) -> None:
    now = time.monotonic()
    ends_at, check_at = now + MAX_STREAM_SECONDS, now + HEARTBEAT_SECONDS
    await _write(response, f"retry: {RECONNECT_MILLISECONDS}\n\n".encode())
    while client.end_reason is None and now < ends_at:
        message = await client.read(max(0.0, min(check_at, ends_at) - now))
        now = time.monotonic()
        if now >= check_at:
            check_at = now + HEARTBEAT_SECONDS
            message = message or HEARTBEAT
            if not visit.is_still_valid():
                client.end("session")
                break
        if message and client.end_reason is None:
            await _write(response, message)
    # Without a reason, the browser connects again.
    if client.end_reason == "session":
        await _write(response, b"event: end\ndata: {}\n\n")


async def _write(response: web.StreamResponse, message: bytes) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
        await response.write(message)


def _filters(visit: Visit) -> Filters:
    query = list_query(visit, *_FILTERS)
    query.pop("cursor", None)
    return query


def _selection(visit: Visit, query: Filters) -> Selection:
    """Return the filters as conditions on the rows of the hub. A session of a tenant sees only its own."""
    wanted: dict[str, object] = dict(query)
    if "subscription_id" in query:
        if not query["subscription_id"].isdecimal():
            raise Problem(UNPROCESSABLE, "invalid_parameter", "the endpoint's id must be a number")
        wanted["subscription_id"] = int(query["subscription_id"])
    if visit.session.tenant is not None:
        wanted["tenant"] = visit.session.tenant
    return frozenset(wanted.items())
