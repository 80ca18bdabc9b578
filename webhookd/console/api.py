"""The routes that create one-time links: to the portal of a tenant, and to the console."""

from typing import Annotated, TypeAlias, TypedDict
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec import Meta

from webhookd.console import links
from webhookd.console.links import Capability
from webhookd.core import limits
from webhookd.core.settings import is_loopback_host, is_origin
from webhookd.http import fields
from webhookd.http.auth import ACTOR, tenant_of, token_of
from webhookd.http.requests import read_optional_json
from webhookd.http.responses import Problem, json_response, not_found
from webhookd.http.routes import TENANT_ID, DatabaseResource, ProblemCode, route

CREATED = 201
LOGIN_LINK_SECONDS = 300

Capabilities: TypeAlias = Annotated[
    list[Capability],
    Meta(
        max_length=len(links.SCOPE_OF),
        examples=[["view", "resend"]],
        description="`view`: see endpoints, deliveries and attempts; always included. `manage`: create, "
        "change, verify, test, pause and delete endpoints. `resend`: send deliveries again. `secrets`: "
        "rotate secrets. The token needs the scope `read` for `view`, `subscriptions` for `manage` and "
        "`secrets`, and `operate` for `resend`",
    ),
]
LinkUrl: TypeAlias = Annotated[
    str,
    Meta(
        examples=["https://hooks.example.com/portal/enter?code=Yv0…"],
        description="contains a secret code. It works once",
    ),
]

_PUBLIC_URL_MISSING: ProblemCode = (409, "public_url_missing")


class PortalLinkRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/tenants/{tenant}/portal-link."""

    expires_in_seconds: Annotated[
        int,
        Meta(
            ge=limits.MIN_LINK_SECONDS,
            le=limits.MAX_LINK_SECONDS,
            examples=[3600],
            description="the link, and the session that it starts, end after this time",
        ),
    ] = 3600
    capabilities: Capabilities = msgspec.field(default_factory=lambda: list[Capability](["view"]))


class PortalLink(TypedDict):
    """A one-time link to the portal of a tenant."""

    url: LinkUrl
    expires_at: fields.Time
    capabilities: Capabilities


class LoginLink(TypedDict):
    """A one-time link to the console. Its session has the rights of the token, until `expires_at` of it."""

    url: LinkUrl
    expires_at: fields.Time


class ConsoleLinks(DatabaseResource):
    """The routes for one-time links."""

    @route(
        f"POST /v1/tenants/{TENANT_ID}/portal-link",
        "subscriptions",
        "Create a link to the portal of a tenant",
        PortalLink,
        CREATED,
        body=PortalLinkRequest,
        body_optional=True,
        description="For a customer of yours. Opening the link starts a session that sees only this tenant. "
        "The session ends with the link. The link works once: create it when the customer asks for it. With "
        "tokens configured, it needs the setting `api.public_url`.",
        own_problems=((409, "being_erased"), (409, "limit_reached"), _PUBLIC_URL_MISSING),
        for_tenants=True,
    )
    async def _portal(self, request: web.Request) -> web.Response:
        tenant, token = request.match_info["id"], token_of(request)
        if tenant_of(request) not in (None, tenant):
            raise not_found("tenant", tenant)
        body = await read_optional_json(request, PortalLinkRequest, self._max_bytes)
        capabilities = links.sorted_capabilities(body.capabilities)
        if token and (missing := links.missing_scope(capabilities, token.scopes)):
            capability, scope = missing
            raise Problem(
                403, "forbidden", f"this token does not have the scope {scope}, which {capability} needs"
            )
        base = self._base_url(request, is_own=False)
        link = await self._database.run(
            links.create_link,
            "portal",
            token_fingerprint=links.fingerprint(token),
            actor=request[ACTOR],
            expires_in_seconds=body.expires_in_seconds,
            tenant=tenant,
            capabilities=capabilities,
        )
        return json_response(
            {
                "url": f"{base}/portal/enter?code={link.code}",
                "expires_at": link.expires_at,
                "capabilities": capabilities,
            },
            CREATED,
        )

    @route(
        "POST /v1/console/login-link",
        "read",
        "Create a link that logs in to the console",
        LoginLink,
        CREATED,
        description="For the holder of the token: the session has the rights of this token. The link works "
        "once, within five minutes. Without tokens there is no login.",
        own_problems=((409, "limit_reached"), (409, "login_not_needed"), _PUBLIC_URL_MISSING),
        for_tenants=True,
    )
    async def _login(self, request: web.Request) -> web.Response:
        token = token_of(request)
        if token is None:
            raise Problem(
                409, "login_not_needed", "no tokens are configured: open the console without a login"
            )
        base = self._base_url(request, is_own=True)
        link = await self._database.run(
            links.create_link,
            "login",
            token_fingerprint=links.fingerprint(token),
            actor=request[ACTOR],
            expires_in_seconds=LOGIN_LINK_SECONDS,
            session_seconds=self._settings().console.session_seconds,
            tenant=token.tenant or "",
        )
        return json_response(
            {"url": f"{base}/login?code={link.code}", "expires_at": link.expires_at}, CREATED
        )

    def _base_url(self, request: web.Request, *, is_own: bool) -> str:
        """Return the address for a link: api.public_url, or the one that the request used.

        With tokens, the daemon may be behind a proxy, and the Host header says nothing about the address that
        browsers use: a link for someone else must not depend on it. A link for the caller (`is_own`) may,
        if the caller is on this machine.
        """
        api = self._settings().api
        if api.public_url:
            return api.public_url
        base = f"http://{request.host.lower()}"
        if is_origin(base) and (
            not api.tokens or (is_own and is_loopback_host(urlsplit(base).hostname or ""))
        ):
            return base
        raise Problem(
            *_PUBLIC_URL_MISSING, "set api.public_url to the address under which browsers reach webhookd"
        )
