"""Sessions of the console and the portal: signed cookies that every instance can check.

A cookie names a token by its fingerprint, and an end. The rights are read from the configuration at each
request, so a removed token ends its sessions at the reload. The key is in the database, which all instances
share.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeAlias

import msgspec

from webhookd.console.links import SCOPE_OF, fingerprint, token_with
from webhookd.core.settings import Scope, Settings, Token

CONSOLE_COOKIE = "webhookd_session"
PORTAL_COOKIE = "webhookd_portal"
MESSAGE_COOKIE = "webhookd_message"
ALL_SCOPES: frozenset[Scope] = frozenset({"ingest", "subscriptions", "operate", "read", "jobs"})

# What a capability of a portal link allows, in scopes of the API. `secrets` is none: the pages check it.
_SCOPES_OF: dict[str, Scope] = {"view": "read", "manage": "subscriptions", "resend": "operate"}
_ID_BYTES = 16


class Area(StrEnum):
    """Where a session is valid. Its value is the first part of the paths."""

    CONSOLE = ""
    PORTAL = "/portal"

    @property
    def cookie(self) -> str:
        return CONSOLE_COOKIE if self is Area.CONSOLE else PORTAL_COOKIE

    @property
    def path(self) -> str:
        """The path that a browser sends the cookie to."""
        return self.value or "/"


@dataclass(frozen=True, slots=True)
class Session:
    """What a visitor may do."""

    id: str  # random, so that form tokens of one session are useless in another
    actor: str
    scopes: frozenset[Scope]
    may_see_secrets: bool
    tenant: str | None = None
    token: Token | None = None  # None: no tokens are configured, or a portal link opened the session
    is_logged_in: bool = True  # false: it has no cookie, so there is nothing to log out of

    @property
    def came_by_link(self) -> bool:
        """Whether a portal link opened it. It has no token, although others may be configured."""
        return self.tenant is not None and self.token is None


# Without tokens, every user of this machine may do everything.
OPEN_SESSION: Final = Session("open", "console", ALL_SCOPES, may_see_secrets=True, is_logged_in=False)


class Cookie(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a session cookie, readable by its owner and protected by its signature."""

    area: Literal["", "/portal"]
    id: str
    token: str  # the fingerprint of the token that opened the session or made the link; "": no tokens
    ends_at: int  # seconds since 1970
    # Of a portal link. A session of a token has the rights of the token.
    actor: str = ""
    tenant: str = ""
    capabilities: frozenset[str] = frozenset()


def new_id() -> str:
    """Return the id of a new session."""
    return secrets.token_urlsafe(_ID_BYTES)


Purpose: TypeAlias = Literal["session", "form", "message"]


class Signer:
    """Signs what visitors keep for us. A signature for one purpose is invalid for the others."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def signature(self, purpose: Purpose, content: bytes) -> str:
        digest = hmac.digest(self._key, purpose.encode() + b"\n" + content, hashlib.sha256)
        return _base64(digest)

    def seal(self, purpose: Purpose, value: msgspec.Struct) -> str:
        """Return the value with its signature, as text for a cookie."""
        content = msgspec.json.encode(value)
        return f"{_base64(content)}.{self.signature(purpose, content)}"

    def unseal(self, purpose: Purpose, text: str) -> bytes | None:
        """Return the JSON of a sealed value, or None if the signature is wrong."""
        encoded, _, signature = text.partition(".")
        try:
            content = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        except (binascii.Error, ValueError):
            return None
        # A header can have bytes that are not UTF-8. They are surrogates here.
        given = signature.encode(errors="replace")
        if not hmac.compare_digest(self.signature(purpose, content).encode(), given):
            return None
        return content

    def form_token(self, session: Session) -> str:
        """Return the token that every form of this session carries."""
        return self.signature("form", session.id.encode())


def session_of(cookie: Cookie, area: Area, settings: Settings, now: float) -> Session | None:
    """Return what the owner of a cookie may do now, or None: it ended, or its token was removed. Pure."""
    if cookie.area != area.value or cookie.ends_at <= now:
        return None
    tokens = settings.api.tokens
    token = token_with(cookie.token, tokens)
    if token is None and (cookie.token or tokens):
        return None
    if cookie.capabilities:
        return _session_of_link(cookie, token)
    # A token that is bound to a tenant opens the portal only, and any other only the console. It may have
    # changed since the login.
    if token is None or (token.tenant is None) != (area is Area.CONSOLE):
        return None
    return of_token(token, cookie.id)


def of_token(token: Token, session_id: str | None = None) -> Session:
    """Return what a token allows. Without a cookie, each request carries the token itself."""
    scopes = frozenset(token.scopes)
    return Session(
        session_id or f"header:{fingerprint(token)}",
        token.name,
        scopes,
        may_see_secrets="subscriptions" in scopes,
        tenant=token.tenant,
        token=token,
        is_logged_in=session_id is not None,
    )


def _session_of_link(cookie: Cookie, token: Token | None) -> Session | None:
    """Return what a portal link allows: no more than the token that made it can pass on now."""
    if token is not None and token.tenant not in (None, cookie.tenant):
        return None
    allowed = {
        name
        for name, scope in SCOPE_OF.items()
        if name in cookie.capabilities and (token is None or scope in token.scopes)
    }
    scopes = frozenset(_SCOPES_OF[name] for name in allowed if name in _SCOPES_OF)
    return Session(cookie.id, cookie.actor, scopes, "secrets" in allowed, tenant=cookie.tenant)


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
