"""The search of every page: finds whatever a text can be, and goes there if it can be only one thing."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

from aiohttp import web

from webhookd.console.tenants import is_tenant
from webhookd.console.visits import Pages, Visit, page
from webhookd.core.limits import EVENT_TYPE, MAX_EVENT_TYPE_CHARACTERS
from webhookd.http.responses import Problem

MAX_CHARACTERS = 300
NOT_FOUND = 404
# A text that cannot be a key, a correlation id, and so on, is refused by the API.
_NO_MATCH = (NOT_FOUND, 422)
_NUMBER = re.compile(r"[0-9]{1,19}\Z")
# The id of an event as receivers see it, in the header webhook-id.
_WEBHOOK_ID = re.compile(r"evt_[0-9]{1,19}\Z", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
_LABEL = re.compile(r"([^=\s]+)\s*=\s*(.+)\Z")


class Match(NamedTuple):
    """Something that a text may mean: its address, its name, and details that show whether it is meant."""

    url: str
    name: str
    detail: str
    at: str | None = None


Search: TypeAlias = Callable[[Visit, str], Awaitable[Match | None]]


class SearchPages(Pages):
    """The search."""

    @page("GET /search", "read")
    async def search(self, visit: Visit) -> web.StreamResponse:
        """Go to what was found, or show all of it if a text can mean several things."""
        text = visit.request.query.get("q", "").strip()[:MAX_CHARACTERS]
        found = [match for search in _searches(visit, text) if (match := await _asked(search, visit, text))]
        if len(found) == 1:
            return web.Response(status=303, headers={"Location": found[0].url})
        return visit.render("search.html", text=text, found=found)


async def _asked(search: Search, visit: Visit, text: str) -> Match | None:
    try:
        return await search(visit, text)
    except Problem as problem:
        if problem.status not in _NO_MATCH:
            raise
        return None


def _searches(visit: Visit, text: str) -> list[Search]:
    """Return the searches that can find a text, the most likely first."""
    if not text:
        return []
    if _NUMBER.match(text):
        return [_event, _delivery, _endpoint, _key, _correlation, _endpoints]
    if _WEBHOOK_ID.match(text):
        return [_event]
    found: list[Search] = []
    if _LABEL.match(text):
        found.append(_label)
    if _UUID.match(text) and visit.may("jobs"):
        found.append(_job)
    if len(text) <= MAX_EVENT_TYPE_CHARACTERS and re.match(EVENT_TYPE, text):
        found.append(_type)
    found += [_key, _correlation]
    if is_tenant(text):
        found.append(_tenant)
    return [*found, _endpoints]


async def _event(visit: Visit, text: str) -> Match:
    event = await visit.get("/v1/events/{id}", int(text.rpartition("_")[2]))
    return Match(
        visit.url(f"/events/{event['id']}"), f"Event {event['id']}", event["event_type"], event["created_at"]
    )


async def _delivery(visit: Visit, text: str) -> Match:
    delivery = await visit.get("/v1/deliveries/{id}", int(text))
    detail = f"of event {delivery['event_id']} to endpoint {delivery['subscription_id']}"
    return Match(
        visit.url(f"/deliveries/{delivery['id']}"),
        f"Delivery {delivery['id']}",
        detail,
        delivery["created_at"],
    )


async def _endpoint(visit: Visit, text: str) -> Match:
    endpoint = await visit.get("/v1/subscriptions/{id}", int(text))
    return Match(
        visit.url(f"/endpoints/{endpoint['id']}"),
        f"Endpoint {endpoint['id']}",
        endpoint["callback_url"],
        endpoint["created_at"],
    )


async def _job(visit: Visit, text: str) -> Match:
    job = await visit.get("/v1/jobs/{id}", text)
    return Match(
        visit.url(f"/jobs/{job['job_id']}"), f"Job {job['job_id']}", job["job_kind"], job["enqueued_at"]
    )


async def _tenant(visit: Visit, text: str) -> Match:
    tenant = await visit.get("/v1/tenants/{id}", text)
    return Match(visit.url(f"/tenants/{text}"), f"Tenant {text}", tenant["name"] or "", tenant["created_at"])


async def _endpoints(visit: Visit, text: str) -> Match | None:
    found = await visit.get("/v1/subscriptions", search=text, limit=2)
    items = found["items"]
    if len(items) == 1:
        return await _endpoint(visit, str(items[0]["id"]))
    url = visit.url("/endpoints", search=text)
    return Match(url, "Endpoints", "with this text in the URL or the description") if items else None


async def _type(visit: Visit, text: str) -> Match | None:
    return await _events(visit, {"event_type": text}, "of this type", is_list=True)


async def _key(visit: Visit, text: str) -> Match | None:
    return await _events(visit, {"idempotency_key": text}, "with this key")


async def _correlation(visit: Visit, text: str) -> Match | None:
    return await _events(visit, {"correlation_id": text}, "with this correlation id")


async def _label(visit: Visit, text: str) -> Match | None:
    label = _LABEL.match(text)
    if label is None:
        return None
    asked = {f"label.{label[1]}": label[2]}
    return await _events(
        visit, asked, "with this label", is_list=True, query={"label": f"{label[1]}={label[2]}"}
    )


async def _events(
    visit: Visit,
    asked: dict[str, str],
    words: str,
    *,
    is_list: bool = False,
    query: dict[str, str] | None = None,
) -> Match | None:
    """Return the events that match, or the only one. A type and a label are properties of many, so a list."""
    found: Any = await visit.get("/v1/events", limit=2, **asked)
    items = found["items"]
    if not items:
        return None
    newest = items[0]
    if len(items) == 1 and not is_list:
        return Match(
            visit.url(f"/events/{newest['id']}"),
            f"Event {newest['id']} {words}",
            newest["event_type"],
            newest["created_at"],
        )
    return Match(visit.url("/events", **(query or asked)), f"Events {words}", "newest:", newest["created_at"])
