"""What is sent for a lease. Pure: lease, delivery and time in, headers and body out."""

from functools import lru_cache
from typing import NamedTuple

import msgspec

from webhookd.deliveries.attempts import Delivery, Lease
from webhookd.outbound.headers import HeaderProblem, check_headers
from webhookd.outbound.signatures import sign


class Request(NamedTuple):
    """One POST."""

    url: str
    headers: dict[str, str]
    body: bytes


def build_request(lease: Lease, delivery: Delivery, timestamp: int) -> Request:
    """The payload's very bytes, signed by Standard Webhooks; the same id over retries and requeues."""
    body = delivery.payload.encode()
    message_id = f"evt_{lease.event_id}"
    # A subscription's own headers first: none of them can take the place of ours.
    headers = _own_headers(delivery.headers) | {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(delivery.secrets, message_id, timestamp, body),
        "webhook-event-type": delivery.event_type,
        "webhook-attempt": str(lease.attempt),
    }
    if delivery.correlation_id is not None:
        headers["webhook-correlation-id"] = delivery.correlation_id
    return Request(lease.callback_url, headers, body)


@lru_cache(maxsize=1024)  # of few subscriptions at a time, and most have none
def _own_headers(stored: str) -> dict[str, str]:
    headers = check_headers(msgspec.json.decode(stored, type=dict[str, str]))
    if isinstance(headers, HeaderProblem):
        # The API stores none such; but a row may come from elsewhere, and some of them frame the request.
        raise ValueError(f"the subscription's headers cannot be sent: {headers.detail}")  # noqa: TRY004
    return headers
