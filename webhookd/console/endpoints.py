"""The pages of endpoints, which the API calls subscriptions: the list, one endpoint, create and change.

endpoint_actions.py has what is done to an endpoint.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from aiohttp import web

from webhookd.console import endpoint_forms as forms
from webhookd.console.lists import (
    NOTHING,
    PAGE_SIZE,
    UNPROCESSABLE,
    Filters,
    found_or_error,
    list_query,
)
from webhookd.console.visits import Pages, Visit, page
from webhookd.http.responses import Problem, encoded

ENDPOINT = "/endpoints/{id:[0-9]+}"
SUBSCRIPTION = "/v1/subscriptions/{id}"
RECENT_DELIVERIES = 10
CONFLICT = 409
# The chart's time span by its name in the address.
SPANS = {"1h": timedelta(hours=1), "24h": timedelta(hours=24), "7d": timedelta(days=7)}
_FILTERS = ("search", "tenant", "event_type", "state")
# The states to filter by, with their labels and the API's filters for them.
STATES: dict[str, tuple[str, dict[str, str]]] = {
    "active": ("Active", {"active": "true", "paused": "false", "verified": "true"}),
    "paused": ("Paused", {"paused": "true"}),
    "disabled": ("Disabled", {"active": "false"}),
    "unverified": ("Not verified", {"verified": "false"}),
}
# What a state means for new events and for deliveries, in a sentence.
HOLDS = {
    "unverified": "It receives nothing until it is verified. Events of the time before are not kept for it.",
    "paused": "New events are kept for it, and its deliveries wait until it is resumed.",
    "disabled": "New events are not kept for it. Its earlier deliveries wait until it is enabled.",
    "tenant_inactive": "Its tenant is not active: new events are kept for it, and its deliveries wait.",
}


class EndpointPages(Pages):
    """The list of endpoints, one endpoint, and the forms that create and change it."""

    @page("GET /", "read", in_portal=True, in_console=False)
    async def portal_home(self, visit: Visit) -> web.StreamResponse:
        """Go to the endpoints, the first page of the portal."""
        return visit.go("/endpoints")

    @page("GET /endpoints", "read", in_portal=True)
    async def list_endpoints(self, visit: Visit) -> web.StreamResponse:
        """List endpoints, newest first, with their last day."""
        query = list_query(visit, *_FILTERS)
        if visit.in_portal:
            query.pop("tenant", None)
        asked: dict[str, str] = dict(query)
        state = asked.pop("state", None)
        error: str | None
        if state is not None and state not in STATES:
            found, error = NOTHING, f"State: choose one of {', '.join(STATES)}."
        else:
            asked |= STATES[state][1] if state is not None else {}
            found, error = await found_or_error(visit, "/v1/subscriptions", asked)
        return visit.render(
            "endpoints.html",
            UNPROCESSABLE if error else 200,
            query=query,
            found=found,
            error=error,
            states=[("", "all"), *((name, label) for name, (label, _) in STATES.items())],
            stats=await stats_of_many(visit, found["items"]),
        )

    @page("GET /endpoints/new", "subscriptions", in_portal=True)
    async def new_form(self, visit: Visit) -> web.StreamResponse:
        """Show the form of a new endpoint. A link may fill in its tenant."""
        fields = Filters({"format": "raw"})
        if tenant := visit.request.query.get("tenant"):
            fields["tenant"] = tenant
        return visit.render("endpoint_new.html", fields=fields, error=None, newest_id=await _newest_id(visit))

    @page("POST /endpoints/new", "subscriptions", in_portal=True)
    async def create(self, visit: Visit) -> web.StreamResponse:
        """Create an endpoint, and show its secret: this response is the only place that has it.

        A reload sends the form again. It names the newest endpoint at the time when it was shown, so a newer
        endpoint with the same values is the result of this form.
        """
        if "secret" in visit.form and not visit.session.may_see_secrets:
            raise Problem(403, "forbidden", "this session may not set secrets")
        try:
            body = forms.body_of_new(visit.form)
            if visit.in_portal:
                body["tenant"] = visit.session.tenant
                # Refused if it is erased: the endpoint would create it again.
                await visit.get("/v1/tenants/{id}", visit.session.tenant)
            if existing := await _created_before(visit, body):
                return visit.go(
                    f"/endpoints/{existing}",
                    "This endpoint was already created by the same form, so nothing was changed. Its secret "
                    "is shown only once.",
                )
            created = await visit.post("/v1/subscriptions", body=body)
        except Problem as problem:
            if problem.status not in (CONFLICT, UNPROCESSABLE):
                raise
            return visit.render(
                "endpoint_new.html",
                problem.status,
                fields=Filters(visit.form),
                error=problem.detail,
                newest_id=visit.form.get("newest_id", ""),
            )
        return visit.render("endpoint_created.html", endpoint=created, own_secret="secret" in visit.form)

    @page(f"GET {ENDPOINT}", "read", in_portal=True)
    async def show(self, visit: Visit) -> web.StreamResponse:
        """Show an endpoint."""
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        span = visit.request.query.get("span", "24h")
        if span not in SPANS:
            span = "24h"
        found = await visit.get("/v1/deliveries", subscription_id=endpoint["id"], limit=RECENT_DELIVERIES)
        return visit.render(
            "endpoint.html",
            endpoint=endpoint,
            deliveries=found["items"],
            more_deliveries=found["next_cursor"] is not None,
            hold_text=HOLDS.get(endpoint["held_because"]),
            stats=await stats_of(visit, endpoint["id"], SPANS[span]),
            span=span,
            spans=list(SPANS),
            may_ping="ping" in visit.settings.subscriptions.verification_methods,
        )

    @page(f"GET {ENDPOINT}/edit", "subscriptions", in_portal=True)
    async def edit_form(self, visit: Visit) -> web.StreamResponse:
        """Show the form that changes an endpoint."""
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        fields = forms.fields_of(endpoint)
        return visit.render(
            "endpoint_edit.html",
            endpoint=endpoint,
            fields=Filters(fields),
            original=_text(fields),
            error=None,
        )

    @page(f"POST {ENDPOINT}/edit", "subscriptions", in_portal=True)
    async def edit(self, visit: Visit) -> web.StreamResponse:
        """Change what was changed in the form, so that a change by another person at the same time stays."""
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        try:
            change = forms.body_of_change(visit.form, _original(visit.form.get("original", "{}")))
            if change:
                endpoint = await visit.patch(SUBSCRIPTION, visit.item_id, body=change)
        except Problem as problem:
            if problem.status not in (CONFLICT, UNPROCESSABLE):
                raise
            return visit.render(
                "endpoint_edit.html",
                problem.status,
                endpoint=endpoint,
                fields=Filters(visit.form),
                original=visit.form.get("original", "{}"),
                error=problem.detail,
            )
        message = "Saved." if change else "Nothing was changed."
        if "callback_url" in change and endpoint["pending_callback_url"]:
            message = "Saved. Verify the new address: deliveries go to the current address until then."
        elif "callback_url" in change and not endpoint["verified"]:
            message = "Saved. Verify the endpoint: nothing is sent until then."
        return visit.go(f"/endpoints/{visit.item_id}", message)


async def _newest_id(visit: Visit) -> int:
    found = await visit.get("/v1/subscriptions", limit=1)
    return found["items"][0]["id"] if found["items"] else 0


async def _created_before(visit: Visit, body: Mapping[str, Any]) -> int | None:
    """Return the endpoint that the same form has created already."""
    newest_id, url = visit.form.get("newest_id", ""), body["callback_url"]
    if not newest_id or not url:
        return None
    tenant = body.get("tenant") or ""
    found = await visit.get("/v1/subscriptions", tenant=tenant or None, limit=PAGE_SIZE)
    same: Iterable[int] = (
        item["id"]
        for item in found["items"]
        if item["id"] > forms.number(newest_id)
        and item["tenant"] == tenant
        and item["callback_url"].lower().rstrip("/") == url.lower().rstrip("/")
        and set(item["event_types"]) == set(body.get("event_types", ()))
    )
    return next(iter(same), None)


async def stats_of_many(visit: Visit, endpoints: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the numbers of the last day by the endpoint's id, with the points of a sparkline."""
    if not endpoints:
        return {}
    ids = ",".join(str(endpoint["id"]) for endpoint in endpoints)
    found = await visit.get("/v1/stats/subscriptions", ids=ids, hours=24)
    return {item["subscription_id"]: item | {"points": _points(item["sparkline"])} for item in found["items"]}


def _points(spark: dict[str, list[int]]) -> list[dict[str, int]]:
    pairs = zip(spark["delivered"], spark["failed"], strict=True)
    return [{"delivered": delivered, "failed": failed} for delivered, failed in pairs]


async def stats_of(visit: Visit, subscription_id: int, span: timedelta) -> dict[str, Any]:
    """Return the numbers of an endpoint over a time span."""
    since = (datetime.now(UTC) - span).isoformat()
    found: dict[str, Any] = await visit.get("/v1/stats", subscription_id=subscription_id, since=since)
    return found


def _text(fields: Mapping[str, str]) -> str:
    return encoded(fields).decode()


def _original(text: str) -> dict[str, str]:
    """Return the values that the form was filled with."""
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise Problem(400, "bad_request", "the form is damaged. Reload the page and try again") from error
