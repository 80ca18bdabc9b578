"""Who asks, and whether they may. Reads the settings anew at each request: a reload is felt at once.

Without tokens all is allowed, on a loopback address alone: there the danger is a web page in a browser of the
same machine, so what comes from another origin, or by another name, is refused.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web

from webhookd.core.settings import Scope, Settings, Token
from webhookd.http.problems import Problem

ACTOR = "actor"  # of a request: who asks
ANYBODY = "api"  # who asks where no token is asked for

_SCHEME = "bearer "


class Auth:
    """Decides by the settings of the moment; where we listen was decided at the start."""

    def __init__(self, settings: Callable[[], Settings], *, on_loopback: bool) -> None:
        self._settings = settings
        self._on_loopback = on_loopback

    def require(self, request: web.Request, scope: Scope) -> str:
        """Who asks, for the record, if the request may; a Problem says why not."""
        tokens = self._settings().api.tokens
        if not tokens and self._on_loopback:
            _refuse_other_origins(request)
            return ANYBODY
        token = _matching(tokens, request.headers.getall("Authorization", []))
        if token is None:
            raise Problem(
                401,
                "unauthorized",
                "a good token is needed: Authorization: Bearer …",
                headers={"WWW-Authenticate": "Bearer"},
                close=True,
            )
        if scope not in token.scopes:
            raise Problem(403, "forbidden", f"this token has not the scope {scope}", close=True)
        name = token.name.strip()
        return name if name and name.isprintable() else ANYBODY


def _matching(tokens: tuple[Token, ...], given: list[str]) -> Token | None:
    """The token that was given. Every one is compared, by digest and in constant time, found or not."""
    value = given[0] if len(given) == 1 else ""
    if value[: len(_SCHEME)].lower() != _SCHEME:
        value = ""
    presented = value[len(_SCHEME) :].strip()
    digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).hexdigest()
    found = None
    for token in tokens:
        if hmac.compare_digest(digest, token.sha256.lower()) and presented:
            found = token
    return found


def _refuse_other_origins(request: web.Request) -> None:
    if _is_foreign(request) or not _is_local(request.host):
        raise Problem(
            403,
            "forbidden",
            "without tokens only this machine may ask, as localhost or by a loopback address",
            close=True,
        )


def _is_foreign(request: web.Request) -> bool:
    """Whether another origin's page asks; one that is no URL is nobody's we know."""
    origin = request.headers.get("Origin")
    try:
        return origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()
    except ValueError:
        return True


def _is_local(host: str) -> bool:
    """A name of an attacker's that resolves to 127.0.0.1 is none of this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
