"""Authentication and scopes. Reads the settings at each request, so a reload takes effect at once.

Without tokens every request is allowed, but only on a loopback address. There the risk is a web page in a
browser on the same machine, so requests from another origin or with another host name are rejected.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from webhookd.core.settings import Scope, Settings, Token
from webhookd.http.responses import Problem

ACTOR = "actor"  # the request's key for the token's name
TENANT = "tenant"  # the request's key for the tenant that the token is bound to, or None
TOKEN = "token"  # noqa: S105  the request's key for the Token, or None where no token is required
ANONYMOUS = "api"  # the actor where no token is required

_SCHEME = "bearer "


class Caller(NamedTuple):
    """Who sent a request: the name of the token, the tenant that it is bound to, and the token itself."""

    name: str
    tenant: str | None = None
    token: Token | None = None


def tenant_of(request: web.Request) -> str | None:
    """Return the tenant whose rows the request may see; None: all rows."""
    tenant: str | None = request[TENANT]
    return tenant


def token_of(request: web.Request) -> Token | None:
    """Return the token that the request was sent with; None where no token is required."""
    token: Token | None = request[TOKEN]
    return token


class Auth:
    """Checks tokens against the current settings. The listening address is fixed at start."""

    def __init__(self, settings: Callable[[], Settings], *, on_loopback: bool) -> None:
        self._settings = settings
        self._on_loopback = on_loopback

    def require(self, request: web.Request, scope: Scope, *, for_tenants: bool) -> Caller:
        """Return who sent the request, or raise a Problem. `for_tenants`: its token may be bound to one."""
        tokens = self._settings().api.tokens
        if not tokens and self._on_loopback:
            if not _is_local(request):
                raise Problem(
                    403,
                    "forbidden",
                    "this API has no tokens, so it accepts only requests for localhost or a loopback "
                    "address, from the same origin",
                    close=True,
                )
            return Caller(ANONYMOUS)
        token = matching_token(tokens, _presented(request.headers.getall("Authorization", [])))
        if token is None:
            raise Problem(
                401,
                "unauthorized",
                "a valid token is required: Authorization: Bearer …",
                headers={"WWW-Authenticate": "Bearer"},
                close=True,
            )
        if scope not in token.scopes:
            raise Problem(403, "forbidden", f"this token does not have the scope {scope}", close=True)
        if token.tenant is not None and not for_tenants:
            raise Problem(403, "forbidden", "a token that is bound to a tenant cannot use this", close=True)
        name = token.name.strip()
        return Caller(name if name and name.isprintable() else ANONYMOUS, token.tenant, token)


def matching_token(tokens: tuple[Token, ...], presented: str) -> Token | None:
    """Return the matching token. Every digest is compared in constant time, whether one matched or not."""
    digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).hexdigest()
    found = None
    for token in tokens:
        if hmac.compare_digest(digest, token.sha256.lower()) and presented:
            found = token
    return found


def _presented(given: list[str]) -> str:
    """Return the token of an Authorization header, or the empty text."""
    value = given[0] if len(given) == 1 else ""
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else ""


def _is_local(request: web.Request) -> bool:
    """Return whether a request is for this machine, and not from a page of another origin.

    An Origin that is not a URL is another one. A host name other than localhost may be a DNS rebinding.
    """
    origin = request.headers.get("Origin")
    try:
        if origin is not None and urlsplit(origin).netloc.lower() != request.host.lower():
            return False
        name = urlsplit(f"//{request.host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
