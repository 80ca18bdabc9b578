"""Who may open what: every page and action of the console and the portal, for every kind of session.

The pages are taken from the program, so a new page is tested without a change here.
"""

import asyncio
import re
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import aiohttp
import pytest

import webhookd.daemon.daemon  # noqa: F401  imports all pages
from tests.flow.conftest import MakeApi
from tests.support.api import Client, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.visitor import Shown, Visitor
from tests.support.waiting import until
from webhookd.console import links
from webhookd.console.sessions import (
    CONSOLE_COOKIE,
    PORTAL_COOKIE,
    Area,
    Cookie,
    Signer,
    new_id,
)
from webhookd.console.visits import PageRoute, Pages
from webhookd.core.settings import Scope, Token
from webhookd.http import auth

PUBLIC = "https://hooks.example.com"
SCOPES: tuple[Scope, ...] = ("ingest", "subscriptions", "operate", "read", "jobs")
CAPABILITIES: dict[str, frozenset[Scope]] = {
    "view": frozenset({"read"}),
    "manage": frozenset({"read", "subscriptions"}),
    "resend": frozenset({"read", "operate"}),
    "secrets": frozenset({"read"}),
    "manage,resend,secrets": frozenset({"read", "subscriptions", "operate"}),
}
# In everything of the other tenant.
MARK = "otherones"
FINISHED = """
    select count(*) = 2 from webhookd.webhook_delivery_sagas s
    where s.status in ('Completed', 'DeadLettered')"""
# No link of the portal leads elsewhere. `#` is a place in the page.
PORTAL_LINK = re.compile(r"/portal(/|\Z)|/assets/|#")


def all_pages() -> list[PageRoute]:
    """Return every declared page."""

    def below(kind: type[Pages]) -> Iterable[type[Pages]]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    return [
        method.page_route(None)
        for kind in below(Pages)
        if kind.__module__.startswith("webhookd.")
        for method in vars(kind).values()
        if hasattr(method, "page_route")
    ]


PAGES = all_pages()


class Ids(NamedTuple):
    """The rows of a tenant."""

    tenant: str
    subscription: int
    event: int
    delivery: int

    def path(self, page: PageRoute, area: Area) -> str:
        """Return the page's path with the id of the row that it is about."""
        kind = page.path.split("/")[1]
        item = {
            "endpoints": self.subscription,
            "deliveries": self.delivery,
            "events": self.event,
            "tenants": self.tenant,
            "jobs": "0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262",
        }.get(kind, 1)
        return area.value + re.sub(r"\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", str(item), page.path)


class World(NamedTuple):
    """A daemon with tokens, and two tenants that have the same things."""

    api: Client
    session: aiohttp.ClientSession
    signer: Signer
    own: Ids
    other: Ids

    def visitor(self, **cookies: str) -> Visitor:
        visitor = Visitor(self.session, self.api.daemon)
        visitor.cookies |= cookies
        return visitor

    async def portal(self, capabilities: str = "view", tenant: str = "own") -> Visitor:
        """Return a visitor of the portal, by a link."""
        made = await self.api.post(
            f"/v1/tenants/{tenant}/portal-link", {"capabilities": capabilities.split(",")}
        )
        assert made.status == 201, made
        visitor = self.visitor()
        entered = await visitor.enter(made.body["url"])
        assert entered.status == 303, entered.text
        return visitor

    async def console(self, name: str = "all") -> Visitor:
        """Return a visitor of the console, by the token with this name."""
        visitor = self.visitor()
        assert (await visitor.log_in(name)).status == 303
        return visitor

    def sealed(self, **changes: Any) -> str:
        """Return a cookie with a valid signature, as of the token `all`."""
        values: dict[str, Any] = {
            "area": Area.CONSOLE.value,
            "id": new_id(),
            "token": fingerprint("all"),
            "ends_at": int(time.time()) + 600,
        }
        return self.signer.seal("session", Cookie(**(values | changes)))


def fingerprint(token: str) -> str:
    """Return the fingerprint of a test token."""
    [entry] = tokens({token: ()})
    return links.fingerprint(Token(name=token, sha256=entry["sha256"], scopes=()))


def entries(**tenants: str) -> list[dict[str, Any]]:
    """Return the tokens of the daemon, some of them bound to a tenant."""
    made = tokens({"all": SCOPES, "reader": ("read",), "bound": SCOPES, "ingest": ("ingest",)})
    return [
        entry | ({"tenant": tenants[entry["name"]]} if entry["name"] in tenants else {}) for entry in made
    ]


@pytest.fixture
async def world(make_api: MakeApi, session: aiohttp.ClientSession, endpoint: Endpoint, flow: Flow) -> World:
    """Start the daemon, and make both tenants."""
    settings = {"tokens": entries(bound="own"), "public_url": PUBLIC}
    api = (await make_api(api=settings)).as_token("all")
    made = []
    for tenant in ("own", "other"):
        mark = MARK if tenant == "other" else "ours"
        await api.request("PUT", f"/v1/tenants/{tenant}", json={"name": mark})
        subscription = await api.subscribe(
            endpoint,
            tenant=tenant,
            event_type=f"{mark}.paid",
            callback_url=endpoint.url(f"/{mark}"),
            description=mark,
        )
        event = await api.event(event_type=f"{mark}.paid", tenant=tenant, payload={"is": mark})
        made.append((tenant, subscription["id"], event.body["id"]))
    await until(flow.daemon, FINISHED)
    rows = [
        Ids(*ids, (await api.get(f"/v1/deliveries?event_id={ids[2]}")).body["items"][0]["id"]) for ids in made
    ]
    return World(api, session, Signer(await links.console_key(flow.daemon)), *rows)


async def send(visitor: Visitor, page: PageRoute, path: str, form_token: str = "") -> Shown:
    """Open a page, or send its form without other fields."""
    data = {"data": {"form_token": form_token}} if page.method == "POST" else {}
    return await visitor.request(page.method, path, **data)


def is_turned_away(shown: Shown, page: PageRoute, area: Area) -> bool:
    """Return whether the visitor has no session here: a page leads to the login, and a form is refused."""
    if page.method == "GET":
        return shown.status == 303 and shown.headers["Location"].startswith(f"{area.value}/login")
    return shown.status == 401


def test_pages_are_found() -> None:
    """The list from the program has the pages of both areas."""
    found = {(page.method, page.path) for page in PAGES}
    assert {("GET", "/"), ("GET", "/events"), ("GET", "/endpoints"), ("POST", "/logout")} <= found
    assert len([page for page in PAGES if page.in_portal]) > 15
    assert {page.path for page in PAGES if page.scope is None} == {"/login", "/enter"}


@pytest.mark.parametrize("capabilities", CAPABILITIES)
async def test_portal_session_opens_its_own_rows_only(world: World, capabilities: str) -> None:
    """Every page of the portal by own and by foreign ids; none of the console; no link out of the portal."""
    visitor = await world.portal(capabilities)
    form_token = await visitor.form_token("/portal/endpoints")
    scopes = CAPABILITIES[capabilities]
    for page in PAGES:
        if page.in_console and page.scope is not None:
            shown = await send(visitor, page, world.own.path(page, Area.CONSOLE), form_token)
            assert is_turned_away(shown, page, Area.CONSOLE), (page, shown.status)
        if not page.in_portal or page.scope is None:
            continue
        has_id = "{" in page.path
        allowed = page.scope in scopes
        if page.path.endswith("/rotate"):
            allowed = "secrets" in capabilities
        cases = [(world.own, True), (world.other, False)] if has_id else [(world.own, True)]
        for ids, is_own in cases:
            shown = await send(visitor, page, ids.path(page, Area.PORTAL), form_token)
            if not allowed:
                assert shown.status == 403, (page, shown.status, shown.text)
            elif not is_own:
                assert shown.status == 404, (page, shown.status, shown.text)
            else:
                assert shown.status in (200, 303, 409, 422), (page, shown.status, shown.text)
            assert MARK not in shown.html, page
            out = [link for link in shown.links if not PORTAL_LINK.match(link)]
            assert not out, (page, out)
            assert re.match(r"/portal/", shown.headers.get("Location", "/portal/")), page
    assert (await world.api.get(f"/v1/subscriptions/{world.own.subscription}")).status == 200
    other = (await world.api.get(f"/v1/subscriptions/{world.other.subscription}")).body
    assert other["held_because"] is None


@pytest.mark.parametrize("query", ["tenant=other", f"search={MARK}", f"event_type={MARK}.paid", "cursor=999"])
async def test_filters_do_not_reach_another_tenant(world: World, query: str) -> None:
    """A filter for another tenant, its texts or its types finds nothing of it."""
    visitor = await world.portal("manage,resend,secrets")
    for page in PAGES:
        if page.method == "GET" and page.in_portal and page.scope and "{" not in page.path:
            shown = await visitor.get(f"/portal{page.path}?{query}")
            assert f"/{MARK}" not in shown.html
            assert f'/endpoints/{world.other.subscription}"' not in shown.html
            assert f'/deliveries/{world.other.delivery}"' not in shown.html


async def test_portal_creates_for_its_own_tenant(world: World) -> None:
    """A tenant, or a secret without the right to see it, in the form of a portal changes nothing."""
    for capabilities, shows_secret in (("manage", False), ("manage,secrets", True)):
        visitor = await world.portal(capabilities)
        page = await visitor.get("/portal/endpoints/new")
        assert 'name="tenant"' not in page.html
        assert ('name="secret"' in page.html) == shows_secret
        fields = {"callback_url": "https://receiver.example/x", "event_types": "a.b", "tenant": "other"}
        form = page.hidden("/portal/endpoints/new")
        created = await visitor.request("POST", "/portal/endpoints/new", data=form | fields)
        assert created.status == 200, created.text
        assert ("whsec_" in created.html) == shows_secret
        newest = (await world.api.get("/v1/subscriptions?limit=1")).body["items"][0]
        assert (newest["tenant"], newest["event_types"]) == ("own", ["a.b"])
    visitor = await world.portal("manage")
    secret = {"secret": "whsec_" + "A" * 32}
    refused = await visitor.submit("/portal/endpoints/new", "/portal/endpoints", **fields, **secret)
    assert refused.status == 403
    erase = {"erase": "yes", "confirmation": "127.0.0.1"}
    path = f"/portal/endpoints/{world.own.subscription}/delete"
    deleted = await visitor.follow(await visitor.submit(path, path, **erase))
    assert "being erased" not in deleted.text
    assert (await world.api.get("/v1/deliveries?subscription_id=1")).body["items"]


async def test_only_a_valid_cookie_of_the_area_opens_a_page(world: World) -> None:
    """No cookie, a cookie of the other area, a changed, expired or foreign cookie: every page refuses it."""
    portal, console = await world.portal("manage,resend,secrets"), await world.console()
    of_portal, of_console = portal.cookies[PORTAL_COOKIE], console.cookies[CONSOLE_COOKIE]
    other = Signer(b"x" * 32)
    link = {"area": "/portal", "tenant": "own", "capabilities": frozenset({"view", "manage"})}
    expired, soon = int(time.time()) - 1, int(time.time()) + 600
    wrong: dict[Area, list[str]] = {
        Area.CONSOLE: [
            "",
            of_portal,
            *tampered(of_console),
            world.sealed(ends_at=expired),
            world.sealed(token=""),
            world.sealed(token=fingerprint("unknown")),
            world.sealed(token=fingerprint("bound")),
            world.sealed(**link),
            other.seal("session", Cookie("", new_id(), fingerprint("all"), soon)),
            world.signer.seal("message", Cookie("", new_id(), fingerprint("all"), soon)),
        ],
        Area.PORTAL: [
            "",
            of_console,
            *tampered(of_portal),
            world.sealed(**link, ends_at=expired),
            world.sealed(**link, token=""),
            world.sealed(area="/portal"),
            world.sealed(**link | {"tenant": "other"}, token=fingerprint("bound")),
        ],
    }
    for area, cookies in wrong.items():
        for cookie in cookies:
            visitor = world.visitor(**({area.cookie: cookie} if cookie else {}))
            for page in PAGES:
                if page.scope is None or area not in page.areas:
                    continue
                shown = await send(visitor, page, world.own.path(page, area))
                assert is_turned_away(shown, page, area), (area, page, shown.status, cookie)
    # The same, unchanged, are valid.
    assert (await portal.get("/portal/endpoints")).status == 200
    assert (await console.get("/endpoints")).status == 200
    assert (
        await world.visitor(**{PORTAL_COOKIE: world.sealed(**link)}).get("/portal/endpoints")
    ).status == 200


def tampered(cookie: str) -> Iterable[str]:
    """Yield variants of a cookie that nobody has signed."""
    content, _, signature = cookie.partition(".")
    yield content
    yield f"{content}."
    yield f".{signature}"
    yield f"{content}A.{signature}"
    yield f"{content}.{signature[:-1]}{'A' if signature[-1] != 'A' else 'B'}"
    yield f"{content[:10]}{'A' if content[10] != 'A' else 'B'}{content[11:]}.{signature}"


async def test_cookies_of_any_bytes_are_no_session(world: World) -> None:
    """Bytes that are not UTF-8, or not base64, lead to the login like no cookie."""
    for value in (b"\xff\xfe.\xff", b"abc.\xe9", b"\xc3\xa9.x", b"%00", b"a" * 5000, b"....", b"=.="):
        for name in (b"webhookd_session", b"webhookd_message"):
            head = b"GET /endpoints HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            answer = await world.api.raw(head + b"Cookie: " + name + b"=" + value + b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 303"), (name, value, answer[:200])


async def test_removed_token_ends_its_sessions(world: World) -> None:
    """At the reload, also the session of its portal links; other tokens keep theirs."""
    mine, other, portal = (
        await world.console("all"),
        await world.console("reader"),
        await world.portal("manage"),
    )
    daemon = world.api.daemon
    daemon.token = "reader"
    daemon.configure(api={"tokens": [entry for entry in entries() if entry["name"] != "all"]})
    assert await daemon.reload()
    for visitor, area in ((mine, Area.CONSOLE), (portal, Area.PORTAL)):
        shown = await visitor.get(f"{area.value}/endpoints")
        assert (shown.status, shown.headers["Location"][: len(area.value) + 6]) == (
            303,
            f"{area.value}/login",
        )
    assert (await other.get("/endpoints")).status == 200


async def test_changed_token_changes_its_sessions(world: World) -> None:
    """A token that is now bound to a tenant loses the console, and one with less scopes its capabilities."""
    mine, portal = await world.console("all"), await world.portal("manage,resend,secrets")
    bound = world.visitor()
    assert (await bound.log_in("bound")).headers["Location"] == "/portal/"
    assert (await bound.get("/portal/endpoints")).status == 200
    daemon = world.api.daemon
    daemon.token = "reader"
    fewer = [
        entry | ({"scopes": ["read", "operate"]} if entry["name"] == "all" else {})
        for entry in entries(bound="other")
    ]
    daemon.configure(api={"tokens": fewer})
    assert await daemon.reload()
    assert MARK in (await bound.get("/portal/endpoints")).html, "the rights of the token are those of now"
    assert (await mine.get("/endpoints/new")).status == 403
    assert (await portal.get("/portal/endpoints/new")).status == 403
    assert (await portal.get(f"/portal/endpoints/{world.own.subscription}/rotate")).status == 403
    assert (await portal.get(f"/portal/endpoints/{world.own.subscription}/replay")).status == 200
    daemon.configure(api={"tokens": entries(all="other")})
    assert await daemon.reload()
    for visitor, path in ((mine, "/endpoints"), (portal, "/portal/endpoints"), (bound, "/portal/endpoints")):
        assert (await visitor.get(path)).status == 303, path


async def test_scopes_of_a_token_limit_the_console(world: World) -> None:
    """With `read` alone, every page of another scope and every action is refused; its buttons are hidden."""
    visitor = await world.console("reader")
    form_token = await visitor.form_token("/endpoints")
    for page in PAGES:
        if not page.in_console or page.scope in (None, "read"):
            continue
        shown = await send(visitor, page, world.own.path(page, Area.CONSOLE), form_token)
        assert shown.status == 403, (page, shown.status)
    shown = await visitor.get(f"/endpoints/{world.own.subscription}")
    assert shown.links
    assert not [link for link in shown.links if link.startswith(f"/endpoints/{world.own.subscription}/")]
    assert (await visitor.get(f"/endpoints/{world.own.subscription}/rotate")).status == 403


async def test_forms_need_the_token_of_their_session(world: World) -> None:
    """Every form of both areas refuses a missing, a wrong, and another session's form token."""
    for area, mine, another in (
        (Area.CONSOLE, await world.console(), await world.console()),
        (
            Area.PORTAL,
            await world.portal("manage,resend,secrets"),
            await world.portal("manage,resend,secrets"),
        ),
    ):
        stolen = await another.form_token(f"{area.value}/endpoints")
        assert stolen != await mine.form_token(f"{area.value}/endpoints")
        for page in PAGES:
            if page.method != "POST" or page.scope is None or area not in page.areas:
                continue
            for form_token in ("", "wrong", "\udcff".encode(errors="replace").decode(), stolen):
                shown = await send(mine, page, world.own.path(page, area), form_token)
                assert (shown.status, "stale_form" in shown.text) == (403, True), (page, form_token)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": f"{PUBLIC}.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_forms_of_other_sites_are_refused(world: World, headers: dict[str, str]) -> None:
    """Every form, also the login, with a valid session and form token."""
    for area, visitor in (
        (Area.CONSOLE, await world.console()),
        (Area.PORTAL, await world.portal("manage,resend,secrets")),
    ):
        form_token = await visitor.form_token(f"{area.value}/endpoints")
        for page in PAGES:
            if page.method == "POST" and area in page.areas:
                path, data = world.own.path(page, area), {"form_token": form_token, "token": "all"}
                shown = await visitor.request("POST", path, data=data, headers=headers)
                assert (shown.status, "foreign_form" in shown.text) == (403, True), (page, shown.status)
    own = {"Origin": PUBLIC, "Sec-Fetch-Site": "same-origin"}
    logged_in = await world.visitor().request("POST", "/login", data={"token": "all"}, headers=own)
    assert logged_in.status == 303


async def test_portal_link_opens_one_session(world: World) -> None:
    """A GET of the link uses nothing up; the button works once; then the page says that it has expired."""
    made = await world.api.post("/v1/tenants/own/portal-link", {})
    path = made.body["url"].removeprefix(PUBLIC)
    visitor = world.visitor()
    for _ in range(2):
        shown = await visitor.get(path)
        assert shown.status == 200
        assert "Continue" in shown.text
        assert not visitor.cookies
    assert (await visitor.enter(made.body["url"])).headers["Location"] == "/portal/"
    home = await visitor.follow(await visitor.get("/portal/"))
    assert home.status == 200
    used = await world.visitor().enter(made.body["url"])
    assert (used.status, "has expired or was already used" in used.text) == (401, True)
    out = await visitor.submit("/portal/logout", "/portal/endpoints")
    assert out.headers["Location"] == "/portal/enter"
    assert PORTAL_COOKIE not in visitor.cookies
    assert (await visitor.get("/portal/endpoints")).status == 303


async def test_pages_that_may_frame_the_portal(make_api: MakeApi, session: aiohttp.ClientSession) -> None:
    """Only those of console.frame_ancestors may show the portal, and none may show the console."""
    allowed = "https://app.example.com"
    api = await make_api(
        api={"tokens": entries(), "public_url": PUBLIC},
        console={"frame_ancestors": [allowed], "name": "Shop & Co <x>"},
    )
    visitor = Visitor(session, api.daemon)
    for path, ancestors in (
        ("/login", "'none'"),
        ("/", "'none'"),
        ("/portal/enter", allowed),
        ("/portal/", allowed),
    ):
        shown = await visitor.get(path)
        assert shown.headers["Content-Security-Policy"].endswith(f"frame-ancestors {ancestors}"), path
    assert "Shop &amp; Co &lt;x&gt;" in (await visitor.get("/portal/enter")).html


async def test_portal_without_tokens(make_api: MakeApi, session: aiohttp.ClientSession) -> None:
    """A link works, its session sees its tenant only, and no session opens the portal without a link."""
    api = await make_api()
    for tenant in ("own", "other"):
        await api.post(
            "/v1/subscriptions",
            {"callback_url": f"https://{tenant}.example/", "event_types": ["a"], "tenant": tenant},
        )
    visitor = Visitor(session, api.daemon)
    assert (await visitor.get("/portal/endpoints")).status == 303
    made = await api.post("/v1/tenants/own/portal-link", {})
    await visitor.enter(made.body["url"])
    shown = await visitor.get("/portal/endpoints")
    assert "https://own.example/" in shown.text
    assert "https://other.example/" not in shown.text
    assert (await visitor.get("/portal/endpoints/2")).status == 404


async def test_login_makes_a_new_session_each_time(world: World) -> None:
    """A session that was planted before is replaced, and the cookie has all its flags."""
    planted = world.sealed(token=fingerprint("reader"))
    visitor = world.visitor(**{CONSOLE_COOKIE: planted})
    seen = {planted}
    for _ in range(3):
        shown = await visitor.log_in("all")
        seen.add(visitor.cookies[CONSOLE_COOKIE])
        flags = {part.strip().lower() for part in shown.set_cookies[CONSOLE_COOKIE].split(";")[1:]}
        assert {"httponly", "secure", "samesite=strict", "path=/"} <= flags
        assert not any(flag.startswith("domain") for flag in flags)
    assert len(seen) == 4
    link = await world.api.post("/v1/tenants/own/portal-link", {})
    entered = await world.visitor().enter(link.body["url"])
    flags = {part.strip().lower() for part in entered.set_cookies[PORTAL_COOKIE].split(";")[1:]}
    assert {"httponly", "secure", "samesite=strict", "path=/portal"} <= flags
    form_tokens = {await (await world.console()).form_token("/endpoints") for _ in range(2)}
    assert len(form_tokens) == 2


async def test_cookie_is_not_secure_without_tls(make_api: MakeApi, session: aiohttp.ClientSession) -> None:
    """A browser would drop it."""
    api = await make_api(api={"tokens": entries()})
    shown = await Visitor(session, api.daemon).log_in("all")
    assert "secure" not in shown.set_cookies[CONSOLE_COOKIE].lower()
    assert "httponly" in shown.set_cookies[CONSOLE_COOKIE].lower()


async def test_failed_logins_are_limited(world: World) -> None:
    """After twenty wrong tokens or codes in a minute, 429 with Retry-After. A right token still logs in."""
    visitor = world.visitor()
    for number in range(20):
        if number % 2:
            shown = await visitor.log_in(f"wrong{number}")
        else:
            shown = await visitor.request("POST", "/portal/enter", data={"code": f"wrong{number}"})
        # The console and the portal are the same address, and have one limit.
        assert shown.status == 401, number
    for path, data in (
        ("/login", {"token": "wrong"}),
        ("/login", {"code": "x"}),
        ("/portal/enter", {"code": "x"}),
    ):
        limited = await visitor.request("POST", path, data=data)
        assert limited.status == 429
        assert 1 <= int(limited.headers["Retry-After"]) <= 60
        assert not limited.set_cookies
    # Behind a proxy all clients have one address, and none may lock out the others.
    assert (await visitor.log_in("all")).status == 303
    assert "all" not in "".join(line["message"] for line in world.api.daemon.logged("wrong"))


async def test_failed_logins_in_parallel_are_limited(world: World) -> None:
    """Requests that wait for the database at the same time count too."""
    visitor = world.visitor()
    shown = await asyncio.gather(
        *(visitor.request("POST", "/portal/enter", data={"code": f"x{number}"}) for number in range(100))
    )
    assert sum(one.status == 401 for one in shown) == 20
    assert sum(one.status == 429 for one in shown) == 80


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example",
        "///evil.example",
        "//[",
        "/\\evil.example",
        "\\\\evil.example",
        "https://evil.example",
        "http:evil.example",
        "javascript:alert(1)",
        "/\t/evil.example",
        "/\n/evil.example",
        "evil.example",
        "/a\r\nSet-Cookie: x=y",
        "/\u2028",
    ],
)
async def test_login_does_not_lead_to_other_sites(world: World, target: str) -> None:
    """By the form and by the address, with a token and with a link."""
    visitor = world.visitor()
    form = await visitor.request("GET", "/login", params={"next": target})
    assert form.hidden("/login")["next"] == "/"
    for data in (
        {"token": "all"},
        {"code": (await world.api.post("/v1/console/login-link")).body["url"].partition("code=")[2]},
    ):
        shown = await visitor.request("POST", "/login", data=data | {"next": target})
        assert (shown.status, shown.headers["Location"]) == (303, "/")
    good = await visitor.request("POST", "/login", data={"token": "all", "next": "/endpoints?state=paused"})
    assert good.headers["Location"] == "/endpoints?state=paused"


async def test_token_without_read_cannot_log_in(world: World) -> None:
    """The console needs it for every page."""
    shown = await world.visitor().log_in("ingest")
    assert (shown.status, shown.set_cookies) == (403, {})


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configured digest is compared, with hmac.compare_digest, whether one has matched or not."""
    compared: list[str] = []

    def compare(given: str, expected: str) -> bool:
        compared.append(expected)
        return given == expected

    configured = tuple(
        Token(name=entry["name"], sha256=entry["sha256"], scopes=("read",)) for entry in entries()
    )
    monkeypatch.setattr("webhookd.http.auth.hmac.compare_digest", compare)
    for presented in ("all", "ingest", "wrong", ""):
        compared.clear()
        auth.matching_token(configured, presented)
        assert compared == [token.sha256 for token in configured]
