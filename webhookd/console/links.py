"""One-time links to the console and to a tenant's portal. Calls schema/console/links.sql.

A link carries a random code, of which the database has only the SHA-256. Redeeming it returns what the new
session may do, once.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias

from webhookd.core.settings import Scope, Token
from webhookd.db.connection import Connection, fetch_one

Kind: TypeAlias = Literal["login", "portal"]
Capability: TypeAlias = Literal["view", "manage", "resend", "secrets"]

CODE_BYTES = 32
# What token_urlsafe makes of these bytes. Other text is refused without asking the database.
_CODE = re.compile(r"[A-Za-z0-9_-]{43}")
FINGERPRINT_DIGITS = 32
# In the order in which they are shown, each with the scope that a token needs to pass it on.
SCOPE_OF: dict[Capability, Scope] = {
    "view": "read",
    "manage": "subscriptions",
    "resend": "operate",
    "secrets": "subscriptions",
}


class NewLink(NamedTuple):
    """A stored link with its code, which is not stored, and its end."""

    code: str
    expires_at: datetime
    session_expires_at: datetime


class Redeemed(NamedTuple):
    """What the session of a link may do, and until when."""

    token_fingerprint: str  # of the token that requested the link; empty: there were no tokens
    actor: str
    tenant: str  # of a portal; of a login: the tenant that the token was bound to, or empty
    capabilities: frozenset[str]  # of a portal
    session_expires_at: datetime


def fingerprint(token: Token | None) -> str:
    """Return the name of a token in sessions: a digest of its digest. Empty if no token is required."""
    if token is None:
        return ""
    return hashlib.sha256(b"webhookd console\n" + token.sha256.lower().encode()).hexdigest()[
        :FINGERPRINT_DIGITS
    ]


def token_with(fingerprint_: str, tokens: Iterable[Token]) -> Token | None:
    """Return the token that has this fingerprint, or None if it is no longer configured."""
    found = None
    for token in tokens:
        if hmac.compare_digest(fingerprint(token).encode(), fingerprint_.encode(errors="replace")):
            found = token
    return found


def sorted_capabilities(capabilities: Iterable[Capability]) -> list[Capability]:
    """Return the capabilities in the order of SCOPE_OF, each once, with `view`, which every portal needs."""
    wanted = {*capabilities, "view"}
    return [capability for capability in SCOPE_OF if capability in wanted]


def missing_scope(capabilities: Iterable[Capability], scopes: Iterable[Scope]) -> tuple[str, Scope] | None:
    """Return the first capability that a token with these scopes cannot pass on, and the scope it lacks."""
    held = set(scopes)
    return next(
        (
            (capability, SCOPE_OF[capability])
            for capability in capabilities
            if SCOPE_OF[capability] not in held
        ),
        None,
    )


async def create_link(
    connection: Connection,
    kind: Kind,
    *,
    token_fingerprint: str,
    actor: str,
    expires_in_seconds: int,
    session_seconds: float | None = None,
    tenant: str = "",
    capabilities: Iterable[Capability] = (),
) -> NewLink:
    """Store a link. Its session ends after `session_seconds`, or together with the link."""
    code = secrets.token_urlsafe(CODE_BYTES)
    row = await fetch_one(
        connection,
        "select * from webhookd.create_console_link($1, $2, $3, $4, $5, $6, $7, $8)",
        _digest(code),
        kind,
        token_fingerprint,
        actor,
        expires_in_seconds,
        session_seconds,
        tenant,
        list(capabilities),
    )
    return NewLink(code, row["expires_at"], row["session_expires_at"])


async def redeem_link(connection: Connection, kind: Kind, code: str) -> Redeemed | None:
    """Use a link. None: there is no such link of this kind, it was used, or it has expired."""
    if not _CODE.fullmatch(code):
        return None
    row = await connection.fetchrow("select * from webhookd.redeem_console_link($1, $2)", _digest(code), kind)
    if row is None:
        return None
    return Redeemed(
        row["token_fingerprint"],
        row["actor"],
        row["tenant"],
        frozenset(row["capabilities"]),
        row["session_expires_at"],
    )


async def console_key(connection: Connection) -> bytes:
    """Return the key that signs cookies. All instances share it."""
    key: bytes = await connection.fetchval("select webhookd.console_key()")
    return key


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode()).digest()
