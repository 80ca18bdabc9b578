"""One-time links to the console and to portals: what they contain, which tokens may create them."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.flow.conftest import MakeApi
from tests.support.api import Client, tokens
from tests.support.flow import Flow
from webhookd.console import links
from webhookd.core.settings import Scope, Token

PUBLIC = "https://hooks.example.com"
SCOPES: tuple[Scope, ...] = ("ingest", "subscriptions", "operate", "read", "jobs")
PORTAL = "/v1/tenants/acme/portal-link"
LOGIN = "/v1/console/login-link"


async def with_tokens(make_api: MakeApi, *, public_url: str = PUBLIC, **scopes: tuple[Scope, ...]) -> Client:
    """Start a daemon with these tokens. One called acme or globex is bound to that tenant."""
    entries = tokens(scopes)
    for entry in entries:
        if entry["name"] in ("acme", "globex"):
            entry["tenant"] = entry["name"]
    return await make_api(api={"tokens": entries, "public_url": public_url})


def code_of(url: str, start: str) -> str:
    """Return the code of a link that begins with this text."""
    assert url.startswith(start), url
    code = url.removeprefix(start)
    assert len(code) >= 43
    return code


def is_in(text: str, seconds: float) -> bool:
    """Return whether it is a time, about so many seconds from now."""
    left = datetime.fromisoformat(text) - datetime.now(UTC)
    return abs(left - timedelta(seconds=seconds)) < timedelta(seconds=30)


def fingerprint(token: str) -> str:
    """Return the fingerprint of a test token, computed from its description."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return hashlib.sha256(f"webhookd console\n{digest}".encode()).hexdigest()[:32]


async def test_portal_link_is_redeemed_once(make_api: MakeApi, flow: Flow) -> None:
    """It names api.public_url; its session has the tenant and the capabilities, and ends with the link."""
    api = (await with_tokens(make_api, all=SCOPES)).as_token("all")
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    body = {"expires_in_seconds": 600, "capabilities": ["secrets", "resend"]}
    made = await api.post(PORTAL, body)
    assert made.status == 201, made
    assert set(made.body) == {"url", "expires_at", "capabilities"}
    assert made.body["capabilities"] == ["view", "resend", "secrets"]
    assert is_in(made.body["expires_at"], 600)
    code = code_of(made.body["url"], f"{PUBLIC}/portal/enter?code=")
    assert await links.redeem_link(flow.daemon, "login", code) is None
    redeemed = await links.redeem_link(flow.daemon, "portal", code)
    assert redeemed == links.Redeemed(
        fingerprint("all"),
        "all",
        "acme",
        frozenset({"view", "resend", "secrets"}),
        datetime.fromisoformat(made.body["expires_at"]),
    )
    assert await links.redeem_link(flow.daemon, "portal", code) is None


async def test_login_link_is_redeemed_once(make_api: MakeApi, flow: Flow) -> None:
    """It lives five minutes; its session belongs to the token, and lasts as the settings say."""
    entries = tokens({"support": ("read",)})
    api = await make_api(api={"tokens": entries, "public_url": PUBLIC}, console={"session_seconds": 600})
    made = await api.as_token("support").post(LOGIN)
    assert made.status == 201, made
    assert set(made.body) == {"url", "expires_at"}
    assert is_in(made.body["expires_at"], 300)
    code = code_of(made.body["url"], f"{PUBLIC}/login?code=")
    assert await links.redeem_link(flow.daemon, "portal", code) is None
    redeemed = await links.redeem_link(flow.daemon, "login", code)
    assert redeemed is not None
    assert redeemed[:4] == (fingerprint("support"), "support", "", frozenset())
    assert is_in(redeemed.session_expires_at.isoformat(), 600)
    assert await links.redeem_link(flow.daemon, "login", code) is None


async def test_body_of_a_portal_link_is_optional(api: Client, flow: Flow) -> None:
    """Without it: an hour, and only view. Without tokens the link has the address of the request."""
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    bodies: tuple[Any, ...] = (None, {}, {"capabilities": []})
    for body in bodies:
        made = await api.post(PORTAL, body)
        assert made.status == 201, made
        assert made.body["capabilities"] == ["view"]
        assert is_in(made.body["expires_at"], 3600)
        code = code_of(made.body["url"], f"http://127.0.0.1:{api.daemon.port}/portal/enter?code=")
        redeemed = await links.redeem_link(flow.daemon, "portal", code)
        assert redeemed is not None
        assert redeemed[:4] == ("", "api", "acme", frozenset({"view"}))


async def test_only_the_digest_of_a_code_is_stored(api: Client, flow: Flow) -> None:
    """No row of any table contains the code."""
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    made = await api.post(PORTAL)
    code = code_of(made.body["url"], f"http://127.0.0.1:{api.daemon.port}/portal/enter?code=")
    [row] = await flow.superuser.fetch("select l::text as text, code_sha256 from webhookd.console_links l")
    assert row["code_sha256"] == hashlib.sha256(code.encode()).digest()
    assert code not in row["text"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"expires_in_seconds": 59}, "invalid_request"),
        ({"expires_in_seconds": 604801}, "invalid_request"),
        ({"expires_in_seconds": 60.5}, "invalid_request"),
        ({"expires_in_seconds": "3600"}, "invalid_request"),
        ({"expires_in_seconds": None}, "invalid_request"),
        ({"expires_in_seconds": 10**30}, "invalid_request"),
        ({"capabilities": ["admin"]}, "invalid_request"),
        ({"capabilities": "view"}, "invalid_request"),
        ({"capabilities": [["view"]]}, "invalid_request"),
        ({"capabilities": None}, "invalid_request"),
        ({"capabilities": ["view"] * 5}, "invalid_request"),
        ({"tenant": "globex"}, "unknown_field"),
        ({"__proto__": {}}, "unknown_field"),
    ],
)
async def test_bad_body_of_a_portal_link_is_rejected(
    api: Client, flow: Flow, body: dict[str, Any], code: str
) -> None:
    """422, and no link is stored."""
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    assert (await api.post(PORTAL, body)).problem == (422, code)
    assert await flow.superuser.fetchval("select count(*) from webhookd.console_links") == 0


async def test_limits_of_a_portal_link_are_accepted(api: Client) -> None:
    """The shortest, the longest, and all capabilities, some of them twice."""
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    for seconds in (60, 604_800):
        made = await api.post(PORTAL, {"expires_in_seconds": seconds})
        assert made.status == 201
        assert is_in(made.body["expires_at"], seconds)
    made = await api.post(PORTAL, {"capabilities": ["secrets", "resend", "manage", "resend"]})
    assert made.body["capabilities"] == ["view", "manage", "resend", "secrets"]


async def test_portal_link_needs_an_existing_tenant(api: Client, flow: Flow) -> None:
    """404 for an unknown tenant, 409 while it is being erased."""
    assert (await api.post(PORTAL)).problem == (404, "not_found")
    assert (await api.post("/v1/tenants/a%20b/portal-link")).problem == (404, "not_found")
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    # Without its service, so that the erasure does not finish.
    await flow.superuser.execute(
        "insert into webhookd.erasures (tenant, requested_by, tried_at) values ('acme', 'test', 'infinity')"
    )
    assert (await api.post(PORTAL)).problem == (409, "being_erased")
    assert await flow.superuser.fetchval("select count(*) from webhookd.console_links") == 0


@pytest.mark.parametrize(
    ("capability", "scope"),
    [("view", "read"), ("manage", "subscriptions"), ("secrets", "subscriptions"), ("resend", "operate")],
)
async def test_token_passes_on_only_its_own_rights(make_api: MakeApi, capability: str, scope: Scope) -> None:
    """A capability needs its scope; `view` is part of every link, and the route needs `subscriptions`."""
    without = tuple(other for other in SCOPES if other != scope)
    api = await with_tokens(make_api, all=SCOPES, without=without)
    assert (await api.as_token("all").request("PUT", "/v1/tenants/acme", json={})).status == 201
    body = {"capabilities": [capability]}
    assert (await api.as_token("all").post(PORTAL, body)).status == 201
    refused = await api.as_token("without").post(PORTAL, body)
    assert refused.problem == (403, "forbidden")
    assert scope in refused.body["detail"]
    if scope == "operate":
        assert (await api.as_token("without").post(PORTAL, {"capabilities": ["manage"]})).status == 201


async def test_bound_token_makes_links_for_its_own_tenant(make_api: MakeApi, flow: Flow) -> None:
    """For another tenant, it answers as if the tenant did not exist."""
    api = await with_tokens(make_api, all=SCOPES, acme=SCOPES, globex=SCOPES)
    assert (await api.as_token("all").request("PUT", "/v1/tenants/acme", json={})).status == 201
    made = await api.as_token("acme").post(PORTAL, {"capabilities": ["manage", "resend", "secrets"]})
    assert made.status == 201
    refused = await api.as_token("globex").post(PORTAL)
    unknown = await api.as_token("acme").post("/v1/tenants/nobody/portal-link")
    assert refused.problem == unknown.problem == (404, "not_found")
    login = await api.as_token("acme").post(LOGIN)
    redeemed = await links.redeem_link(
        flow.daemon, "login", code_of(login.body["url"], f"{PUBLIC}/login?code=")
    )
    assert redeemed is not None
    assert redeemed.tenant == "acme"


async def test_links_need_tokens_with_scopes(make_api: MakeApi, api: Client) -> None:
    """401 without a token, 403 without the scope; without tokens there is no login."""
    secured = await with_tokens(make_api, ingest=("ingest",), read=("read",))
    for path in (PORTAL, LOGIN):
        assert (await secured.post(path)).problem == (401, "unauthorized")
        assert (await secured.as_token("ingest").post(path)).problem == (403, "forbidden")
    assert (await secured.as_token("read").post(PORTAL)).problem == (403, "forbidden")
    assert (await api.post(LOGIN)).problem == (409, "login_not_needed")


async def test_host_header_is_not_the_address_of_a_link(make_api: MakeApi, flow: Flow) -> None:
    """With tokens a portal link needs api.public_url; a login link may have a loopback address."""
    api = (await with_tokens(make_api, public_url="", all=SCOPES)).as_token("all")
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    own = f"http://127.0.0.1:{api.daemon.port}"
    hosts = ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "localhost/evil", "[::1", "")
    for host in (None, *hosts):
        headers = {} if host is None else {"Host": host}
        portal = await api.request("POST", PORTAL, headers=headers)
        assert portal.problem == (409, "public_url_missing"), host
        login = await api.request("POST", LOGIN, headers=headers)
        if host is None:
            code_of(login.body["url"], f"{own}/login?code=")
        else:
            assert login.problem == (409, "public_url_missing"), host
    assert await flow.superuser.fetchval("select count(*) from webhookd.console_links") == 1


async def test_public_url_hides_the_host_header(make_api: MakeApi) -> None:
    """Whatever Host says, and also without tokens."""
    open_api = await make_api(api={"public_url": PUBLIC})
    assert (await open_api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    code_of((await open_api.post(PORTAL)).body["url"], f"{PUBLIC}/portal/enter?code=")
    secured = (await with_tokens(make_api, all=SCOPES)).as_token("all")
    for path, page in ((PORTAL, "portal/enter"), (LOGIN, "login")):
        made = await secured.request("POST", path, headers={"Host": "evil.example"})
        code_of(made.body["url"], f"{PUBLIC}/{page}?code=")


async def test_unused_links_are_limited(make_api: MakeApi, flow: Flow) -> None:
    """409 at a thousand; one less is enough, and the links of other tenants and tokens do not count."""
    api = await with_tokens(make_api, all=SCOPES, other=SCOPES)
    for tenant in ("acme", "globex"):
        assert (await api.as_token("all").request("PUT", f"/v1/tenants/{tenant}", json={})).status == 201
    for kind, tenant, capabilities in (("portal", "acme", ["view"]), ("login", "", [])):
        await flow.superuser.execute(
            """
            insert into webhookd.console_links
            select sha256(convert_to($2 || n, 'UTF8')), $2, $1, 'all', $3, $4, now(),
                   now() + interval '1 hour', now() + interval '1 hour'
            from generate_series(1, 1000) n
            """,
            fingerprint("all"),
            kind,
            tenant,
            capabilities,
        )
    all_, other = api.as_token("all"), api.as_token("other")
    assert (await all_.post(PORTAL)).problem == (409, "limit_reached")
    assert (await all_.post(LOGIN)).problem == (409, "limit_reached")
    assert (await other.post(PORTAL)).status == 201
    assert (await other.post(LOGIN)).status == 201
    assert (await all_.post("/v1/tenants/globex/portal-link")).status == 201
    await flow.superuser.execute(
        "delete from webhookd.console_links where code_sha256 in (sha256('portal7'), sha256('login7'))"
    )
    assert (await all_.post(PORTAL)).status == 201
    assert (await all_.post(LOGIN)).status == 201
    assert (await all_.post(PORTAL)).problem == (409, "limit_reached")


def test_fingerprint_names_a_token() -> None:
    """It depends on the digest only, in either case, and does not reveal it."""
    digest = hashlib.sha256(b"secret").hexdigest()
    token = Token(name="a", sha256=digest, scopes=("read",))
    same = Token(name="b", sha256=digest.upper(), scopes=("ingest",), tenant="acme")
    assert links.fingerprint(token) == links.fingerprint(same) == fingerprint("secret")
    assert links.fingerprint(token) not in digest
    assert links.fingerprint(None) == ""
    assert links.token_with(fingerprint("secret"), [token]) is token
    assert links.token_with(fingerprint("other"), [token]) is None
    assert links.token_with("", [token]) is None
    assert links.token_with("\ud800", [token]) is None
