"""The pages of deliveries: a filtered list, and one delivery with its attempts, requests and actions."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from webhookd.console.api_calls import decoded
from webhookd.console.events import EventWithPayload
from webhookd.console.html import parsed
from webhookd.console.lists import PAGE_SIZE, UNPROCESSABLE, found_or_error, list_query, sentence
from webhookd.console.names import endpoint_names
from webhookd.console.sent_requests import BODY_FILE, curl_script, message_of, sent_at, sent_headers
from webhookd.console.visits import Pages, Visit, page
from webhookd.core.states import SagaStatus
from webhookd.http.responses import Problem

# Of a delivery with many attempts, unless all are asked for.
SHOWN_ATTEMPTS = 20
REFRESH_SECONDS = 5
# A delivery that changes by then is loaded again, unless its payload is large.
SOON_SECONDS = 60
MAX_REFRESHED_CHARACTERS = 100_000
CONFLICT = 409
FINISHED = (SagaStatus.COMPLETED, SagaStatus.DEAD_LETTERED)

_FILTERS = ("status", "subscription_id", "event_id", "event_type", "error_code")
_TIMES = ("created_after", "created_before")
# The quick filters, by the status that they select.
_VIEWS = (
    (None, "All"),
    ("Pending", "Waiting"),
    ("InProgress", "In progress"),
    ("PendingRetry", "Retrying"),
    ("DeadLettered", "Dead letters"),
    ("Completed", "Delivered"),
)
# Customers do not know workers, which the explanations of the API name.
_FOR_CUSTOMERS = {
    "waits_for_worker": "The next attempt is about to be sent.",
    "in_flight": "An attempt is being sent now.",
    "lease_expired": "An attempt ended without a result. It is sent again soon.",
    "result_reported": "The endpoint has answered. The result is about to be shown here.",
}


class DeliveryPages(Pages):
    """The list of deliveries, one delivery, and its actions."""

    @page("GET /deliveries", "read", in_portal=True)
    async def list_deliveries(self, visit: Visit) -> web.StreamResponse:
        """List deliveries, newest first."""
        own = () if visit.in_portal else ("tenant",)
        query = list_query(visit, *_FILTERS, *own, *_TIMES)
        found, error = await found_or_error(visit, "/v1/deliveries", query)
        return visit.render(
            "deliveries.html",
            UNPROCESSABLE if error else 200,
            query=query,
            found=found,
            error=error,
            names=await endpoint_names(visit, (row["subscription_id"] for row in found["items"])),
            views=_VIEWS,
            page_size=PAGE_SIZE,
        )

    @page("GET /deliveries/{id:[0-9]+}", "read", in_portal=True)
    async def show_delivery(self, visit: Visit) -> web.StreamResponse:
        """Show one delivery."""
        delivery = await visit.get("/v1/deliveries/{id}", visit.item_id)
        body = await visit.call("GET /v1/events/{id}", delivery["event_id"])
        event = msgspec.json.decode(body)
        payload = bytes(decoded(body, EventWithPayload).payload).decode()
        endpoint_id = delivery["subscription_id"]
        names = await endpoint_names(visit, [endpoint_id])
        attempts = delivery["attempts"]
        shown = attempts if visit.request.query.get("attempts") == "all" else attempts[-SHOWN_ATTEMPTS:]
        message = None
        if endpoint_id in names and not event["payload_removed_at"]:
            message = message_of(event, payload, names[endpoint_id])
        return visit.render(
            "delivery.html",
            delivery=delivery,
            explanation=_explanation(visit, delivery),
            is_finished=delivery["status"] in FINISHED,
            refresh_seconds=REFRESH_SECONDS if _changes_soon(delivery, payload) else None,
            event=event,
            payload=payload,
            names=names,
            attempts=shown,
            left_out=len(attempts) - len(shown),
            sent_at={attempt["id"]: sent_at(attempt) for attempt in shown},
            headers={attempt["id"]: sent_headers(message, attempt) for attempt in shown} if message else {},
            curl=curl_script(message, max(1, delivery["attempt_count"])) if message else None,
            body_file=BODY_FILE if message and message.is_large else None,
        )

    @page("POST /deliveries/{id:[0-9]+}/resend", "operate", in_portal=True)
    async def resend(self, visit: Visit) -> web.StreamResponse:
        """Send a finished delivery again, and go to the new delivery."""
        try:
            made = await visit.post("/v1/deliveries/{id}/resend", visit.item_id)
        except Problem as problem:
            if problem.status != CONFLICT:
                raise
            resent = problem.members.get("saga_id")
            if resent is not None:
                message = f"Delivery {visit.item_id} was already sent again: this is the new delivery."
                return visit.go(f"/deliveries/{resent}", message)
            return visit.go(f"/deliveries/{visit.item_id}", sentence(problem.detail), is_error=True)
        return visit.go(f"/deliveries/{made['saga_id']}", f"Delivery {visit.item_id} is sent again.")

    @page("POST /deliveries/{id:[0-9]+}/retry", "operate", in_portal=True)
    async def retry(self, visit: Visit) -> web.StreamResponse:
        """Make the next attempt due now."""
        here = f"/deliveries/{visit.item_id}"
        try:
            await visit.post("/v1/deliveries/{id}/retry", visit.item_id)
        except Problem as problem:
            if problem.status != CONFLICT:
                raise
            return visit.go(here, sentence(problem.detail), is_error=True)
        return visit.go(here, "The next attempt is due now.")


def _changes_soon(delivery: dict[str, Any], payload: str) -> bool:
    """Return whether to load the page again. Not with a large payload, which would be sent each time."""
    if delivery["status"] in FINISHED or delivery["held_because"] or len(payload) > MAX_REFRESHED_CHARACTERS:
        return False
    left = parsed(delivery["next_attempt_at"]) - datetime.now(UTC)
    return delivery["status"] == SagaStatus.IN_PROGRESS or left.total_seconds() < SOON_SECONDS


def _explanation(visit: Visit, delivery: dict[str, Any]) -> str:
    text: str = delivery["explanation"]
    return _FOR_CUSTOMERS.get(delivery["reason"], text) if visit.in_portal else text
