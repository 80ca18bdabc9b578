"""Subscriptions: calls schema/deliveries/subscriptions.sql."""

from datetime import datetime
from typing import Any, NamedTuple

from webhookd.db.connection import Connection, fetch_one


class Created(NamedTuple):
    """A new subscription, with its secret this once."""

    subscription_id: int
    signing_secret: str


class Challenge(NamedTuple):
    """What to ask of which address, and with what to sign it."""

    challenge: str
    callback_url: str
    secrets: list[str]
    headers: str  # a JSON object of strings


class Rotated(NamedTuple):
    """The new secret; the ones before it sign beside it until then."""

    signing_secret: str
    previous_valid_until: datetime


async def create(
    connection: Connection,
    event_type: str,
    callback_url: str,
    *,
    max_attempts: int | None = None,
    base_delay_seconds: float | None = None,
    headers: str = "{}",
    description: str | None = None,
) -> Created:
    """Born active, and not verified."""
    row = await fetch_one(
        connection,
        "select * from webhookd.create_subscription($1, $2, $3, $4, $5, $6)",
        event_type,
        callback_url,
        max_attempts,
        base_delay_seconds,
        headers,
        description,
    )
    return Created(*row)


async def update(connection: Connection, subscription_id: int, changes: dict[str, Any]) -> None:
    """Change the fields that `changes` names; None takes an override back."""
    names = ("active", "callback_url", "max_attempts", "base_delay_seconds", "headers", "description")
    await connection.execute(
        "select webhookd.update_subscription($1, $2, $3, $4, $5, $6, $7, $8)",
        subscription_id,
        list(changes),
        *(changes.get(name) for name in names),
    )


async def begin_verification(connection: Connection, subscription_id: int) -> Challenge:
    """Make the challenge to send; an earlier one counts no more."""
    row = await fetch_one(connection, "select * from webhookd.begin_verification($1)", subscription_id)
    return Challenge(*row)


async def complete_verification(connection: Connection, subscription_id: int, challenge: str) -> None:
    """The endpoint echoed this challenge: the subscription is verified, if nothing changed meanwhile."""
    await connection.execute("select webhookd.complete_verification($1, $2)", subscription_id, challenge)


async def rotate_secret(connection: Connection, subscription_id: int, overlap_seconds: float) -> Rotated:
    """A new secret at once."""
    row = await fetch_one(
        connection, "select * from webhookd.rotate_secret($1, $2)", subscription_id, overlap_seconds
    )
    return Rotated(*row)
