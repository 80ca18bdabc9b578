"""The challenge: asks an endpoint whether it wants the webhooks, through the client that delivers them.

Only an endpoint that echoes the challenge, while it is still the last one and the address still the same,
becomes verified.
"""

from collections.abc import Mapping

import msgspec

from webhookd.context import Context
from webhookd.db.connection import Connection
from webhookd.deliveries import reads, subscriptions
from webhookd.deliveries.subscriptions import Challenge
from webhookd.http.database import Database
from webhookd.http.problems import Problem, invalid, unavailable
from webhookd.outbound.client import VERIFICATION_CONNECTIONS, GuardedClient
from webhookd.outbound.headers import HeaderProblem, check_headers
from webhookd.outbound.outcome import Failure, Outcome
from webhookd.outbound.signatures import CHALLENGE_EVENT_TYPE, ChallengeMessage, sign

# Each may take a whole delivery's timeout; the client has connections for so many beside the deliveries'.
MAX_UNDER_WAY = VERIFICATION_CONNECTIONS


class Verification:
    """Verifies subscriptions, a bounded number at a time."""

    def __init__(self, context: Context, database: Database, client: GuardedClient) -> None:
        self._database = database
        self._client = client
        self._settings = context.settings
        self._under_way = 0

    async def verify(self, subscription_id: int) -> None:
        """Return when it is verified; a Problem says what happened instead."""
        if self._under_way >= MAX_UNDER_WAY:
            raise unavailable("too many verifications are under way")
        self._under_way += 1
        try:
            await self._verify(subscription_id)
        finally:
            self._under_way -= 1

    async def _verify(self, subscription_id: int) -> None:
        async def begin(connection: Connection) -> tuple[Challenge, int]:
            begun = await subscriptions.begin_verification(connection, subscription_id)
            return begun, int((await reads.database_time(connection)).timestamp())

        begun, timestamp = await self._database.ask(begin)
        body = msgspec.json.encode(ChallengeMessage(begun.challenge))
        outcome = await self._client.post(
            begun.callback_url,
            _headers(begun, timestamp, body),
            body,
            self._settings().delivery.timeout_seconds,
        )
        _require_echo(outcome, begun.challenge)
        await self._database.ask(
            lambda connection: subscriptions.complete_verification(
                connection, subscription_id, begun.challenge
            )
        )


def _headers(begun: Challenge, timestamp: int, body: bytes) -> Mapping[str, str]:
    """Signed as a delivery is. The id tells nothing of the challenge but that it is another one."""
    message_id = f"ver_{begun.challenge[:16]}"
    headers = check_headers(msgspec.json.decode(begun.headers, type=dict[str, str]))
    if isinstance(headers, HeaderProblem):  # the row came from elsewhere
        raise invalid(f"the subscription's headers cannot be sent: {headers.detail}", "verification_failed")
    return headers | {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(begun.secrets, message_id, timestamp, body),
        "webhook-event-type": CHALLENGE_EVENT_TYPE,
    }


def _require_echo(outcome: Outcome, challenge: str) -> None:
    if outcome.error_code is not None:
        detail = (
            f"the endpoint answered {outcome.response_status}"
            if outcome.response_status is not None
            else f"the endpoint could not be asked: {outcome.error_code}{_in_words(outcome)}"
        )
        raise _failed(detail, outcome.error_code, outcome)
    if not echoes(outcome.response_excerpt, challenge):
        detail = 'the endpoint did not echo the challenge: {"challenge": "…"} as JSON, or the bare text'
        raise _failed(detail, "CHALLENGE_MISMATCH", outcome)


def _in_words(outcome: Outcome) -> str:
    hint = "; delivery.ca_file adds an authority" if outcome.error_code == Failure.TLS_FAILED else ""
    return f" ({outcome.detail}{hint})" if outcome.detail else ""


def echoes(body: bytes, challenge: str) -> bool:
    """Whether an answer is the challenge, in JSON or bare. Pure."""
    if body.strip() == challenge.encode():
        return True
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(message, dict) and message.get("challenge") == challenge


def _failed(detail: str, error_code: str, outcome: Outcome) -> Problem:
    """Without the answer's body: whoever may subscribe may not read what our network answers."""
    return Problem(
        422,
        "verification_failed",
        detail,
        error_code=error_code,
        response_status=outcome.response_status,
        duration_ms=outcome.duration_ms,
    )
