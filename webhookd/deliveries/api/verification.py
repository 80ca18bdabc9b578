"""Verifies an endpoint with a challenge, sent by the same client as deliveries.

The subscription becomes verified only if the endpoint echoes the challenge, no newer challenge exists and the
address has not changed.
"""

from collections.abc import Mapping

import msgspec

from webhookd.context import Context
from webhookd.db.connection import Connection
from webhookd.deliveries import reads, subscriptions
from webhookd.deliveries.subscriptions import Challenge
from webhookd.http.problems import Problem, invalid, unavailable
from webhookd.http.query_runner import QueryRunner
from webhookd.outbound.client import VERIFICATION_CONNECTIONS, GuardedClient
from webhookd.outbound.headers import HeaderProblem, check_headers
from webhookd.outbound.outcome import Failure, Outcome
from webhookd.outbound.signatures import CHALLENGE_EVENT_TYPE, ChallengeMessage, sign

# A verification may take as long as a delivery; the client reserves this many connections for them.
MAX_CONCURRENT = VERIFICATION_CONNECTIONS


class Verification:
    """Verifies subscriptions, a bounded number at a time."""

    def __init__(self, context: Context, database: QueryRunner, client: GuardedClient) -> None:
        self._database = database
        self._client = client
        self._settings = context.settings
        self._running = 0

    async def verify(self, subscription_id: int) -> None:
        """Return when the subscription is verified; otherwise raise a Problem with the reason."""
        if self._running >= MAX_CONCURRENT:
            raise unavailable("too many verifications are running")
        self._running += 1
        try:
            await self._verify(subscription_id)
        finally:
            self._running -= 1

    async def _verify(self, subscription_id: int) -> None:
        async def start(connection: Connection) -> tuple[Challenge, int]:
            started = await subscriptions.begin_verification(connection, subscription_id)
            return started, int((await reads.database_time(connection)).timestamp())

        started, timestamp = await self._database.run(start)
        body = msgspec.json.encode(ChallengeMessage(started.challenge))
        outcome = await self._client.post(
            started.callback_url,
            _headers(started, timestamp, body),
            body,
            self._settings().delivery.timeout_seconds,
        )
        _require_echo(outcome, started.challenge)
        await self._database.run(
            lambda connection: subscriptions.complete_verification(
                connection, subscription_id, started.challenge
            )
        )


def _headers(started: Challenge, timestamp: int, body: bytes) -> Mapping[str, str]:
    """Return the headers, signed like those of a delivery. The id reveals only the start of the challenge."""
    message_id = f"ver_{started.challenge[:16]}"
    headers = check_headers(msgspec.json.decode(started.headers, type=dict[str, str]))
    if isinstance(headers, HeaderProblem):  # the row was not written by this API
        raise invalid(f"the subscription's headers cannot be sent: {headers.detail}", "verification_failed")
    return headers | {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(started.secrets, message_id, timestamp, body),
        "webhook-event-type": CHALLENGE_EVENT_TYPE,
    }


def _require_echo(outcome: Outcome, challenge: str) -> None:
    if outcome.error_code is not None:
        detail = (
            f"the endpoint responded with {outcome.response_status}"
            if outcome.response_status is not None
            else f"the request to the endpoint failed: {outcome.error_code}{_in_words(outcome)}"
        )
        raise _failed(detail, outcome.error_code, outcome)
    if not echoes(outcome.response_excerpt, challenge):
        detail = 'the endpoint did not echo the challenge, neither as {"challenge": "…"} nor as bare text'
        raise _failed(detail, "CHALLENGE_MISMATCH", outcome)


def _in_words(outcome: Outcome) -> str:
    hint = (
        "; delivery.ca_file adds a certificate authority" if outcome.error_code == Failure.TLS_FAILED else ""
    )
    return f" ({outcome.detail}{hint})" if outcome.detail else ""


def echoes(body: bytes, challenge: str) -> bool:
    """Return whether a response body is the challenge, as JSON or bare. Pure."""
    if body.strip() == challenge.encode():
        return True
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(message, dict) and message.get("challenge") == challenge


def _failed(detail: str, error_code: str, outcome: Outcome) -> Problem:
    """Return the problem without the response body: subscribers must not read what internal hosts respond."""
    return Problem(
        422,
        "verification_failed",
        detail,
        error_code=error_code,
        response_status=outcome.response_status,
        duration_ms=outcome.duration_ms,
    )
