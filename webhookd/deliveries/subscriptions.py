"""Creates, changes and verifies subscriptions. Calls schema/deliveries/subscriptions.sql."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from webhookd.core.settings import VerificationMethod
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


class Test(NamedTuple):
    """What a test request needs. `now` is the database's time."""

    callback_url: str
    format: str
    secrets: list[str]
    headers: str  # a JSON object of strings
    now: datetime
    verified: bool


class Rotated(NamedTuple):
    """The new secret, and until when the previous secrets sign too."""

    signing_secret: str
    previous_valid_until: datetime


async def create(
    connection: Connection,
    event_type: str | None,
    callback_url: str,
    *,
    event_types: list[str] | None = None,
    tenant: str = "",
    filter: Mapping[str, str] | None = None,  # noqa: A002  the name in the API
    paused: bool = False,
    format: str = "raw",  # noqa: A002  the name in the API
    max_per_second: float | None = None,
    max_attempts: int | None = None,
    base_delay_seconds: float | None = None,
    headers: Mapping[str, str] | None = None,
    description: str | None = None,
    secret: str | None = None,
) -> Created:
    """Create a subscription: active, and not verified."""
    row = await fetch_one(
        connection,
        "select * from webhookd.create_subscription($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
        event_type,
        callback_url,
        max_attempts,
        base_delay_seconds,
        _encoded(headers or {}),
        description,
        secret,
        tenant,
        event_types,
        _encoded(filter or {}),
        paused,
        format,
        max_per_second,
    )
    return Created(*row)


async def update(
    connection: Connection, subscription_id: int, changes: Mapping[str, Any], tenant: str | None = None
) -> None:
    """Change the given fields; None removes an override. With a tenant, those of others do not exist."""
    query = "select webhookd.update_subscription($1, $2, $3)"
    await connection.execute(query, subscription_id, _encoded(changes), tenant)


def _encoded(value: Mapping[str, Any]) -> str:
    return msgspec.json.encode(value).decode()


async def begin_verification(
    connection: Connection, subscription_id: int, tenant: str | None = None
) -> Challenge:
    """Create the challenge to send; it replaces an earlier one."""
    query = "select * from webhookd.begin_verification($1, $2)"
    return Challenge(*await fetch_one(connection, query, subscription_id, tenant))


async def complete_verification(
    connection: Connection,
    subscription_id: int,
    challenge: str,
    tenant: str | None = None,
    method: VerificationMethod = "challenge",
) -> None:
    """Mark the subscription as verified, if challenge and address are still the ones that were sent."""
    query = "select webhookd.complete_verification($1, $2, $3, $4)"
    await connection.execute(query, subscription_id, challenge, tenant, method)


async def delete(connection: Connection, subscription_id: int, tenant: str | None = None) -> None:
    """Delete a subscription; its deliveries stay as history."""
    await connection.execute("select webhookd.delete_subscription($1, $2)", subscription_id, tenant)


async def prepare_test(connection: Connection, subscription_id: int, tenant: str | None = None) -> Test:
    """Return what a test request needs."""
    query = "select * from webhookd.prepare_test($1, $2)"
    return Test(*await fetch_one(connection, query, subscription_id, tenant))


async def rotate_secret(
    connection: Connection, subscription_id: int, overlap_seconds: float, tenant: str | None = None
) -> Rotated:
    """Replace the signing secret; the previous one stays valid for the overlap."""
    query = "select * from webhookd.rotate_secret($1, $2, only_tenant => $3)"
    return Rotated(*await fetch_one(connection, query, subscription_id, overlap_seconds, tenant))
