"""The pages of events: a searchable list, and one event with what became of it at each subscription."""

import msgspec
from aiohttp import web

from webhookd.console.api_calls import decoded
from webhookd.console.lists import NOTHING, UNPROCESSABLE, found_or_error, list_query
from webhookd.console.visits import Pages, Visit, page

_FILTERS = ("tenant", "event_type", "idempotency_key", "correlation_id", "created_after", "created_before")


class EventWithPayload(msgspec.Struct):
    """The part of an event that is shown byte for byte."""

    payload: msgspec.Raw


class EventPages(Pages):
    """The list of events, and one event."""

    @page("GET /events", "read")
    async def list_events(self, visit: Visit) -> web.StreamResponse:
        """List events, newest first."""
        query = list_query(visit, *_FILTERS, "label")
        asked: dict[str, str] = dict(query)
        name, equals, value = asked.pop("label", "").partition("=")
        error: str | None
        if name and not equals:
            found, error = NOTHING, "A label is a name and a value, as in region=eu."
        else:
            if equals:
                asked[f"label.{name.strip()}"] = value.strip()
            found, error = await found_or_error(visit, "/v1/events", asked)
        status = UNPROCESSABLE if error else 200
        return visit.render("events.html", status, query=query, found=found, error=error)

    @page("GET /events/{id:[0-9]+}", "read")
    async def show_event(self, visit: Visit) -> web.StreamResponse:
        """Show one event."""
        body = await visit.call("GET /v1/events/{id}", visit.item_id)
        payload = bytes(decoded(body, EventWithPayload).payload).decode()
        return visit.render("event.html", event=msgspec.json.decode(body), payload=payload)
