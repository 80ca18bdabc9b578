"""The pages of events: a searchable list, and one event with what became of it at each subscription."""

import re

import msgspec
from aiohttp import web

from webhookd.console.api_calls import decoded
from webhookd.console.visits import Pages, Visit, list_query, page

_FILTERS = ("tenant", "event_type", "idempotency_key", "correlation_id", "created_after", "created_before")
PAGE_SIZE = 50


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
        if label := asked.pop("label", ""):
            name, _, value = label.partition("=")
            asked[f"label.{name.strip()}"] = value.strip()
        found = await visit.get("/v1/events", limit=PAGE_SIZE, **times(asked))
        return visit.render("events.html", query=query, found=found)

    @page("GET /events/{id:[0-9]+}", "read")
    async def show_event(self, visit: Visit) -> web.StreamResponse:
        """Show one event."""
        body = await visit.call("GET /v1/events/{id}", visit.item_id)
        payload = bytes(decoded(body, EventWithPayload).payload).decode()
        return visit.render("event.html", event=msgspec.json.decode(body), payload=payload)


def times(query: dict[str, str]) -> dict[str, str]:
    """Complete the times of a form, which have no seconds and no zone, to times in UTC."""
    complete = dict(query)
    for name in ("created_after", "created_before", "failed_after", "failed_before", "since", "until"):
        value = complete.get(name, "")
        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?", value):
            seconds = "" if value.count(":") > 1 else ":00"
            complete[name] = f"{value}{seconds}Z"
    return complete
