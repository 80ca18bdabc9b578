"""What is done to an endpoint: verify, pause, disable, test, rotate, delete, replay."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from webhookd.console.endpoint_forms import number, words
from webhookd.console.endpoints import CONFLICT, ENDPOINT, SUBSCRIPTION
from webhookd.console.lists import UNPROCESSABLE, Filters, times
from webhookd.console.visits import Pages, Visit, page
from webhookd.http.responses import Problem, invalid, raw_json

# Events that a step of a replay looks at. Counting is faster than creating.
COUNTED_AT_ONCE = 5000
CREATED_AT_ONCE = 1000
_TEST_TYPE = "webhookd.test"
_TEST_PAYLOAD = '{"test": true}'
# The choices of a replay, in the address of its page too, so that an interrupted replay can be continued.
_REPLAY_FIELDS = ("since", "until", "event_types", "include", "started_at", "after_event_id")
# Refusals that are shown at the form or on the endpoint's page.
_REFUSED = (CONFLICT, UNPROCESSABLE)

# Of a replay, added up over its steps.
_COUNTS = ("examined", "matched", "created", "payload_removed")


class EndpointActionPages(Pages):
    """The actions of one endpoint."""

    @page(f"POST {ENDPOINT}/verify", "subscriptions", in_portal=True)
    async def verify(self, visit: Visit) -> web.StreamResponse:
        """Verify the endpoint, or its new address."""
        method = visit.form.get("method", "challenge")
        target = f"POST {SUBSCRIPTION}/verify"
        return await _done(visit, target, {"method": method}, "Verified.", refused="Not verified: ")

    @page(f"POST {ENDPOINT}/pause", "subscriptions", in_portal=True)
    async def pause(self, visit: Visit) -> web.StreamResponse:
        """Let deliveries wait."""
        return await _changed(visit, {"paused": True}, "Paused: its deliveries wait.")

    @page(f"POST {ENDPOINT}/resume", "subscriptions", in_portal=True)
    async def resume(self, visit: Visit) -> web.StreamResponse:
        """Send what has waited."""
        return await _changed(visit, {"paused": False}, "Resumed: the waiting deliveries are sent.")

    @page(f"POST {ENDPOINT}/disable", "subscriptions", in_portal=True)
    async def disable(self, visit: Visit) -> web.StreamResponse:
        """Route no new events to it."""
        return await _changed(visit, {"active": False}, "Disabled: new events are not kept for it.")

    @page(f"POST {ENDPOINT}/enable", "subscriptions", in_portal=True)
    async def enable(self, visit: Visit) -> web.StreamResponse:
        """Route new events to it again."""
        return await _changed(visit, {"active": True}, "Enabled: it receives new events.")

    @page(f"GET {ENDPOINT}/test", "subscriptions", in_portal=True)
    async def test_form(self, visit: Visit) -> web.StreamResponse:
        """Show the form of a test request."""
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        return _test_page(visit, endpoint, _TEST_TYPE, _TEST_PAYLOAD)

    @page(f"POST {ENDPOINT}/test", "subscriptions", in_portal=True)
    async def test(self, visit: Visit) -> web.StreamResponse:
        """Send a test request, and show how the endpoint responded."""
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        event_type, payload = visit.form.get("event_type", _TEST_TYPE), visit.form.get("payload", "null")
        try:
            body = {"event_type": event_type, "payload": raw_json(_json(payload))}
            result = await visit.post(f"{SUBSCRIPTION}/test", visit.item_id, body)
        except Problem as problem:
            if problem.status not in _REFUSED:
                raise
            return _test_page(visit, endpoint, event_type, payload, error=problem)
        return _test_page(visit, endpoint, event_type, payload, result=result)

    @page(f"GET {ENDPOINT}/rotate", "read", in_portal=True)
    async def rotate_form(self, visit: Visit) -> web.StreamResponse:
        """Ask before the secret is rotated."""
        _require_secrets(visit)
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        return visit.render(
            "endpoint_rotate.html",
            endpoint=endpoint,
            rotated=None,
            overlap_seconds=visit.settings.subscriptions.secret_overlap_seconds,
        )

    @page(f"POST {ENDPOINT}/rotate", "read", in_portal=True)
    async def rotate(self, visit: Visit) -> web.StreamResponse:
        """Rotate the secret, and show the new one: this response is the only place that has it."""
        _require_secrets(visit)
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        rotated = await visit.post(f"{SUBSCRIPTION}/rotate-secret", visit.item_id)
        return visit.render("endpoint_rotate.html", endpoint=endpoint, rotated=rotated, overlap_seconds=0)

    @page(f"GET {ENDPOINT}/delete", "subscriptions", in_portal=True)
    async def delete_form(self, visit: Visit) -> web.StreamResponse:
        """Ask for a confirmation that has to be typed."""
        return _delete_page(visit, await visit.get(SUBSCRIPTION, visit.item_id))

    @page(f"POST {ENDPOINT}/delete", "subscriptions", in_portal=True)
    async def delete(self, visit: Visit) -> web.StreamResponse:
        """Delete the endpoint, and in the console its history too."""
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        if visit.form.get("confirmation", "").lower() != _host_of(endpoint):
            error = "The typed host is not the host of this endpoint, so nothing was deleted."
            return _delete_page(visit, endpoint, UNPROCESSABLE, error)
        is_erased = "erase" in visit.form and not visit.in_portal
        query = {"erase": "true"} if is_erased else None
        await visit.call(f"DELETE {SUBSCRIPTION}", visit.item_id, query=query)
        then = "Its history is being erased." if is_erased else "Its deliveries stay visible."
        return visit.go("/endpoints", f"Endpoint {visit.item_id} is deleted. {then}")

    @page(f"GET {ENDPOINT}/replay", "operate", in_portal=True)
    async def replay_form(self, visit: Visit) -> web.StreamResponse:
        """Show the form of a replay. The address can have its choices, and where it stopped."""
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        given = {name: visit.request.query.get(name, "") for name in _REPLAY_FIELDS}
        if not given["since"]:
            given["since"] = f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%dT%H:%M}"
        return visit.render("endpoint_replay.html", endpoint=endpoint, fields=_filled(given), error=None)

    @page(f"POST {ENDPOINT}/replay", "operate", in_portal=True)
    async def replay(self, visit: Visit) -> web.StreamResponse:
        """Do a step of a replay: count, or create deliveries. The form carries the state to the next step."""
        endpoint = await visit.get(SUBSCRIPTION, visit.item_id)
        fields = _filled({name: visit.form.get(name, "") for name in _REPLAY_FIELDS})
        is_count = visit.form.get("step") != "create"
        try:
            body = _replay_body(fields) | {
                "dry_run": is_count,
                "limit": COUNTED_AT_ONCE if is_count else CREATED_AT_ONCE,
            }
            result = await visit.post(f"{SUBSCRIPTION}/replay", visit.item_id, body)
        except Problem as problem:
            if problem.status not in _REFUSED:
                raise
            return visit.render(
                "endpoint_replay.html", problem.status, endpoint=endpoint, fields=fields, error=problem.detail
            )
        counts = {name: _count(visit, name) + result[name] for name in _COUNTS}
        fields |= {"until": result["until"], "started_at": result["started_at"]}
        is_done = result["last_event_id"] is None
        fields["after_event_id"] = "" if is_done else str(result["last_event_id"])
        return visit.render(
            "endpoint_replaying.html",
            endpoint=endpoint,
            fields=fields,
            counts=counts,
            expected=_count(visit, "expected") if not is_count else 0,
            is_count=is_count,
            is_done=is_done,
        )


async def _done(
    visit: Visit, target: str, body: Mapping[str, object] | None, message: str, refused: str = ""
) -> web.Response:
    """Call a route, and go to the endpoint with the result as a message."""
    path = f"/endpoints/{visit.item_id}"
    try:
        await visit.call(target, visit.item_id, body=body)
    except Problem as problem:
        if problem.status not in _REFUSED:
            raise
        return visit.go(path, f"{refused}{problem.detail}.", is_error=True)
    return visit.go(path, message)


async def _changed(visit: Visit, change: Mapping[str, object], message: str) -> web.Response:
    return await _done(visit, f"PATCH {SUBSCRIPTION}", change, message)


def _test_page(
    visit: Visit,
    endpoint: Mapping[str, Any],
    event_type: str,
    payload: str,
    *,
    result: Mapping[str, Any] | None = None,
    error: Problem | None = None,
) -> web.Response:
    return visit.render(
        "endpoint_test.html",
        error.status if error else 200,
        endpoint=endpoint,
        event_type=event_type,
        payload=payload,
        result=result,
        error=error.detail if error else None,
    )


def _json(text: str) -> str:
    """Return the text if it is one JSON value: it becomes a part of the body for the API."""
    try:
        msgspec.json.decode(text.encode(errors="surrogatepass"), type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"The payload is not JSON: {error}") from error
    return text


def _require_secrets(visit: Visit) -> None:
    if not visit.session.may_see_secrets:
        raise Problem(403, "forbidden", "this session may not see secrets, so it cannot rotate them")


def _host_of(endpoint: Mapping[str, Any]) -> str:
    return urlsplit(endpoint["callback_url"]).hostname or ""


def _delete_page(
    visit: Visit, endpoint: Mapping[str, Any], status: int = 200, error: str | None = None
) -> web.Response:
    return visit.render(
        "endpoint_delete.html", status, endpoint=endpoint, host=_host_of(endpoint), error=error
    )


def _filled(given: Mapping[str, str]) -> Filters:
    """Return the fields that have a value."""
    return Filters({name: text for name, text in given.items() if text})


def _replay_body(fields: Mapping[str, str]) -> dict[str, Any]:
    if "since" not in fields:
        raise invalid("From: a time is required")
    body: dict[str, Any] = times(dict(fields))
    if "event_types" in body:
        body["event_types"] = words(body["event_types"])
    if "after_event_id" in body:
        body["after_event_id"] = number(body["after_event_id"])
    return body


def _count(visit: Visit, name: str) -> int:
    return number(visit.form.get(name, "0"))
