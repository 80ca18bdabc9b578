"""The pages of tenants: list, create, change, the link to a portal, and erasure with its progress."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from aiohttp import web

from webhookd.console.links import SCOPE_OF, Capability
from webhookd.console.lists import PAGE_SIZE, UNPROCESSABLE, found_or_error, list_query
from webhookd.console.visits import Pages, Visit, page
from webhookd.core.limits import MAX_TENANT_CHARACTERS, TENANT
from webhookd.http.responses import Problem
from webhookd.http.routes import TENANT_ID

MAX_COUNTED_ENDPOINTS = 100

ENDPOINTS_SHOWN = 50
REFRESH_SECONDS = 3
NOT_FOUND = 404
CONFLICT = 409
_PATH = f"/tenants/{TENANT_ID}"
_WORDS = {
    "view": "See endpoints, deliveries and attempts",
    "manage": "Create, change, verify, test, pause and delete endpoints",
    "resend": "Send deliveries again",
    "secrets": "Rotate signing secrets",
}
# Lifetimes of a portal link, in seconds. Its session ends with it.
DURATIONS = (
    (900, "15 minutes"),
    (3600, "1 hour"),
    (28_800, "8 hours"),
    (86_400, "1 day"),
    (604_800, "7 days"),
)
_BAD_TENANT = "A tenant's id has 1 to 100 letters, digits and . _ : -"
_COUNTS = (
    ("subscriptions", "Endpoints, with secrets and headers"),
    ("events", "Events, with payloads"),
    ("deliveries", "Deliveries"),
    ("attempts", "Attempts, with responses"),
    ("dead_letters", "Dead letters"),
    ("jobs", "Jobs created from its events"),
)
_WAITS = {
    "a request in flight, or a job that is not finished": "A request is in flight, or a job of the job queue "
    "is not finished. Its rows are removed as soon as it is.",
    "a transaction from before the request": "A transaction from before the erasure may still add rows. The "
    "erasure finishes after that transaction.",
}


def is_tenant(text: str) -> bool:
    """Return whether a text can be the id of a tenant."""
    return len(text) <= MAX_TENANT_CHARACTERS and re.match(TENANT, text) is not None


class TenantPages(Pages):
    """The pages of tenants and erasures. Each call of the API checks the scope again."""

    @page("GET /tenants", "read")
    async def list_tenants(self, visit: Visit) -> web.StreamResponse:
        """List tenants, newest first, or those whose id begins with a text."""
        query = list_query(visit, "prefix")
        found, error = await found_or_error(visit, "/v1/tenants", query)
        if "prefix" in query and not is_tenant(query["prefix"]):
            error = _BAD_TENANT  # the API's words are about a parameter
        status = UNPROCESSABLE if error else 200
        return visit.render("tenants.html", status, query=query, found=found, error=error)

    @page("POST /tenants", "subscriptions")
    async def create_tenant(self, visit: Visit) -> web.StreamResponse:
        """Create a tenant, or go to the one that exists."""
        tenant = visit.form.get("tenant", "")
        if not is_tenant(tenant):
            return visit.go("/tenants", _BAD_TENANT, is_error=True)
        if await _found(visit, tenant) is not None:
            return visit.go(f"/tenants/{tenant}", f"Tenant {tenant} exists already.")
        changes = {"name": visit.form["name"]} if "name" in visit.form else {}
        await visit.call("PUT /v1/tenants/{id}", tenant, body=changes)
        return visit.go(f"/tenants/{tenant}", f"Tenant {tenant} is created.")

    @page(f"GET {_PATH}", "read")
    async def show_tenant(self, visit: Visit) -> web.StreamResponse:
        """Show one tenant."""
        return await _tenant_page(visit)

    @page(f"POST {_PATH}", "subscriptions")
    async def change_tenant(self, visit: Visit) -> web.StreamResponse:
        """Change the name, whether it is active, and how many endpoints it may have."""
        limit = visit.form.get("max_subscriptions")
        changes: dict[str, object] = {
            "name": visit.form.get("name"),
            "active": visit.form.get("active") == "true",
            "max_subscriptions": int(limit)
            if limit is not None and re.fullmatch(r"\d{1,12}", limit)
            else limit,
        }
        try:
            await visit.call("PUT /v1/tenants/{id}", visit.item_id, body=changes)
        except Problem as problem:
            if problem.status not in (UNPROCESSABLE, CONFLICT):
                raise
            return await _tenant_page(visit, problem.status, error=_in_words(problem), given=changes)
        return visit.go(f"/tenants/{visit.item_id}", "Saved.")

    @page(f"POST {_PATH}/portal-link", "subscriptions")
    async def create_portal_link(self, visit: Visit) -> web.StreamResponse:
        """Create a portal link and show it on this page only: it cannot be looked up again."""
        seconds = visit.form.get("expires_in_seconds", "3600")
        body = {
            "capabilities": [name for name in visit.selected("capabilities") if name in SCOPE_OF],
            "expires_in_seconds": int(seconds) if re.fullmatch(r"\d{1,9}", seconds) else 0,
        }
        try:
            link = await visit.post("/v1/tenants/{id}/portal-link", visit.item_id, body)
        except Problem as problem:
            if problem.status not in (UNPROCESSABLE, CONFLICT):
                raise
            return await _tenant_page(visit, problem.status, link_problem=problem)
        return await _tenant_page(visit, 201, link=link)

    @page(f"GET {_PATH}/erase", "subscriptions")
    async def confirm_erasure(self, visit: Visit) -> web.StreamResponse:
        """Say what an erasure removes, and ask for the tenant's id."""
        return await _erase_page(visit)

    @page(f"POST {_PATH}/erase", "subscriptions")
    async def erase(self, visit: Visit) -> web.StreamResponse:
        """Begin the erasure, if the tenant's id was typed."""
        if visit.form.get("confirmation") != visit.item_id:
            return await _erase_page(
                visit, UNPROCESSABLE, error="This is not the tenant's id. Nothing was erased."
            )
        erasure = msgspec.json.decode(await visit.call("DELETE /v1/tenants/{id}", visit.item_id))
        return visit.go(f"/erasures/{erasure['id']}", f"The erasure of tenant {visit.item_id} is running.")

    @page("GET /erasures", "read")
    async def list_erasures(self, visit: Visit) -> web.StreamResponse:
        """List erasures, newest first."""
        query = list_query(visit)
        found = await visit.get("/v1/erasures", limit=PAGE_SIZE, **query)
        return visit.render("erasures.html", query=query, found=found)

    @page("GET /erasures/{id:[0-9]+}", "read")
    async def show_erasure(self, visit: Visit) -> web.StreamResponse:
        """Show the progress of an erasure, and afterwards the evidence."""
        erasure = await visit.get("/v1/erasures/{id}", visit.item_id)
        return visit.render(
            "erasure.html",
            erasure=erasure,
            counts=_COUNTS,
            waits_for=_WAITS.get(erasure["waits_for"], erasure["waits_for"]),
            reloads=visit.request.query.get("reload") == "1",
            refresh_seconds=REFRESH_SECONDS,
        )


async def _found(visit: Visit, tenant: str) -> Any:
    """Return the tenant, or None if it does not exist."""
    try:
        return await visit.get("/v1/tenants/{id}", tenant)
    except Problem as problem:
        if problem.status != NOT_FOUND:
            raise
        return None


async def _running_erasure(visit: Visit, tenant: str) -> Any:
    """Return the erasure of the whole tenant that is not finished, or None."""
    found = await visit.get("/v1/erasures", tenant=tenant, limit=PAGE_SIZE)
    running = (e for e in found["items"] if e["status"] == "running" and e["subscription_id"] is None)
    return next(running, None)


async def _tenant_page(visit: Visit, status: int = 200, **more: Any) -> web.Response:
    name = visit.item_id
    tenant = await _found(visit, name)
    if tenant is None:
        return visit.render("tenant_missing.html", NOT_FOUND, name=name)
    endpoints = await visit.get("/v1/subscriptions", tenant=name, limit=ENDPOINTS_SHOWN)
    values = {"error": None, "given": tenant, "link": None, "link_problem": None} | more
    return visit.render(
        "tenant.html",
        status,
        tenant=tenant,
        endpoints=endpoints,
        stats=await _stats(visit, tenant),
        erasure=await _running_erasure(visit, name),
        capabilities=_capabilities(visit),
        durations=DURATIONS,
        **values,
    )


async def _stats(visit: Visit, tenant: dict[str, Any]) -> Any:
    """Return the numbers of the last day, or None: of many endpoints they take too long to add up."""
    if tenant["subscriptions"] > MAX_COUNTED_ENDPOINTS:
        return None
    since = datetime.now(UTC) - timedelta(days=1)
    return await visit.get("/v1/stats", tenant=tenant["tenant"], since=since.isoformat())


def _capabilities(visit: Visit) -> list[tuple[Capability, str]]:
    """Return what the visitor may pass on with a portal link. `view` is always included."""
    return [(name, _WORDS[name]) for name, scope in SCOPE_OF.items() if name != "view" and visit.may(scope)]


async def _erase_page(visit: Visit, status: int = 200, error: str | None = None) -> web.Response:
    name = visit.item_id
    tenant = await _found(visit, name)
    return visit.render("erase.html", status, name=name, tenant=tenant, error=error, counts=_COUNTS)


def _in_words(problem: Problem) -> str:
    """Return the detail of a refused change in the words of the form."""
    if "max_subscriptions" in problem.detail:
        return "The limit of endpoints must be a number from 0 to 2,147,483,647, or empty."
    return (
        "The name is too long, or has characters that are not allowed."
        if "name" in problem.detail
        else problem.detail
    )
