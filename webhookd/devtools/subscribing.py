"""A receiver's own subscriptions: made or taken up again, verified while it answers, paused when it ends.

A secret is shown once, so what is taken up again gets a new one. So there is one row for a URL and an event
type, however often a receiver starts.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from webhookd.cli.client import Client
from webhookd.core.errors import RequestRefused, ServiceUnavailable, WebhookdError
from webhookd.outbound.outcome import Failure
from webhookd.outbound.urls import UrlProblemCode

# By it and by the URL a receiver knows its own again: another's secret must not be changed.
DESCRIPTION = "webhookd listen"
# Somebody sits before it and waits for the retry; the daemon's own delays are for endpoints that are away.
BASE_DELAY_SECONDS = 1.0
# Of one event type; with more, a new one is made.
MAX_LOOKED_AT = 5000

_NOT_LOCAL = "the daemon does not deliver to this machine: start it with `webhookd serve --local`"
_NOT_TRUSTED = (
    "the daemon does not trust this machine's authority: start it with `webhookd serve --local`,"
    " as the same user or with the same [database] data_dir"
)


@dataclass
class Subscriber:
    """Subscribes one URL, and remembers what it will have to pause."""

    client: Client
    url: str
    subscription_ids: list[int] = field(default_factory=list)

    def subscribe(self, event_type: str) -> str:
        """A subscription that is ready to be verified, as its secret."""
        found = self._own(event_type)
        if found is None:
            asked = {
                "event_type": event_type,
                "callback_url": self.url,
                "base_delay_seconds": BASE_DELAY_SECONDS,
                "description": DESCRIPTION,
            }
            created = self._explained("/v1/subscriptions", asked)
            self.subscription_ids.append(created["id"])
            return str(created["secret"])
        self.subscription_ids.append(found)
        return str(self._explained(f"/v1/subscriptions/{found}/rotate-secret")["secret"])

    def verify(self) -> None:
        """Have the last one send its challenge, and then what waits for it."""
        subscription = f"/v1/subscriptions/{self.subscription_ids[-1]}"
        self._explained(f"{subscription}/verify")
        self.client.patch(subscription, {"active": True})

    def pause(self) -> None:
        """Leave nothing behind that would go on failing."""
        left = []
        reason = ""
        for subscription_id in self.subscription_ids:
            try:
                self.client.patch(f"/v1/subscriptions/{subscription_id}", {"active": False})
            except WebhookdError as error:
                left.append(str(subscription_id))
                reason = str(error)
        if left:
            raise ServiceUnavailable(f"subscription {', '.join(left)} could not be paused: {reason}")

    def _own(self, event_type: str) -> int | None:
        rows = self.client.rows("/v1/subscriptions", {"event_type": event_type}, MAX_LOOKED_AT)
        for row in rows:
            found = msgspec.json.decode(row, type=dict[str, Any])
            if found["callback_url"] == self.url and found["description"] == DESCRIPTION:
                return int(found["id"])
        return None

    def _explained(self, path: str, value: object = None) -> Any:
        try:
            return self.client.post(path, value).value
        except RequestRefused as refused:
            raise _explanation(refused) from refused


def _explanation(refused: RequestRefused) -> WebhookdError:
    """What to do about it, where that is known."""
    error_code = refused.members.get("error_code")
    if refused.code in (UrlProblemCode.BLOCKED_ADDRESS, UrlProblemCode.HOST):
        return WebhookdError(_NOT_LOCAL)
    if error_code == Failure.ADDRESS_BLOCKED:
        return WebhookdError(_NOT_LOCAL)
    if error_code == Failure.TLS_FAILED:
        return WebhookdError(_NOT_TRUSTED)
    if error_code == Failure.CONNECT_FAILED:
        return WebhookdError(
            f"the daemon cannot reach this machine's 127.0.0.1: is it on another one? ({refused})"
        )
    return refused
