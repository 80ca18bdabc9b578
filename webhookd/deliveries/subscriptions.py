"""Creates, changes and verifies subscriptions. Calls schema/deliveries/subscriptions.sql."""

from datetime import datetime
from typing import Any, NamedTuple

from webhookd.db.connection import Connection, fetch_one


class Created(NamedTuple):
    """A new subscription. Its secret is returned only here."""

    subscription_id: int
    signing_secret: str


class Challenge(NamedTuple):
    """A verification challenge: where to send it, and the secrets to sign it with."""

    challenge: str
    callback_url: str
    secrets: list[str]
    headers: str  # a JSON object of strings


class Rotated(NamedTuple):
    """The new secret, and until when the previous secrets sign too."""

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
    """Create a subscription: active, and not verified."""
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
    """Change the given fields; None removes an override."""
    names = ("active", "callback_url", "max_attempts", "base_delay_seconds", "headers", "description")
    await connection.execute(
        "select webhookd.update_subscription($1, $2, $3, $4, $5, $6, $7, $8)",
        subscription_id,
        list(changes),
        *(changes.get(name) for name in names),
    )


async def begin_verification(connection: Connection, subscription_id: int) -> Challenge:
    """Create the challenge to send; it replaces an earlier one."""
    row = await fetch_one(connection, "select * from webhookd.begin_verification($1)", subscription_id)
    return Challenge(*row)


async def complete_verification(connection: Connection, subscription_id: int, challenge: str) -> None:
    """Mark the subscription as verified, if challenge and address are still the ones that were sent."""
    await connection.execute("select webhookd.complete_verification($1, $2)", subscription_id, challenge)


async def rotate_secret(connection: Connection, subscription_id: int, overlap_seconds: float) -> Rotated:
    """Replace the signing secret; the previous one stays valid for the overlap."""
    row = await fetch_one(
        connection, "select * from webhookd.rotate_secret($1, $2)", subscription_id, overlap_seconds
    )
    return Rotated(*row)
