"""Access to the API: tokens and scopes, from file and environment; web pages of other origins."""

import json

import aiohttp

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.support.api import Client, tokens

SCOPES = ("ingest", "subscriptions", "operate", "read")


ROUTES = {
    "ingest": ["POST /v1/events", "POST /v1/events/batch"],
    "subscriptions": [
        "POST /v1/subscriptions",
        "PATCH /v1/subscriptions/1",
        "POST /v1/subscriptions/1/verify",
        "POST /v1/subscriptions/1/rotate-secret",
    ],
    "operate": ["POST /v1/dead-letters/1/requeue", "POST /v1/dead-letters/requeue"],
    "read": [
        "GET /v1/events",
        "GET /v1/events/1",
        "GET /v1/subscriptions",
        "GET /v1/subscriptions/1",
        "GET /v1/deliveries",
        "GET /v1/deliveries/1",
        "GET /v1/dead-letters",
        "GET /v1/dead-letters/1",
        "GET /status",
        "GET /metrics",
        "POST /v1/console/login-link",
    ],
}


async def test_each_route_needs_its_scope(make_api: MakeApi) -> None:
    """401 without a valid token, 403 without the scope, access with it; health needs no token."""
    api = await make_api(api={"tokens": tokens({scope: (scope,) for scope in SCOPES} | {"all": SCOPES})})
    for needed, routes in ROUTES.items():
        for route in routes:
            method, path = route.split(" ")
            refused = await api.request(method, path)
            assert refused.problem == (401, "unauthorized"), route
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            for scope in SCOPES:
                answer = await api.as_token(scope).request(method, path)
                if scope == needed:
                    assert answer.status not in (401, 403, 500), route
                else:
                    assert answer.problem == (403, "forbidden"), route
            assert (await api.as_token("all").request(method, path)).status not in (401, 403, 500)
    assert (await api.get("/healthz")).status == 200
    assert (await api.get("/readyz")).status == 200


async def test_invalid_tokens_get_401(make_api: MakeApi) -> None:
    """Every kind of missing or invalid token gets the same 401."""
    api = await make_api(api={"tokens": tokens({"good": ("read",)})})
    bodies = set()
    for value in (
        "",
        "Bearer",
        "Bearer ",
        "Basic Z29vZA==",
        "good",
        "Bearer goodx",
        "Bearer xood",
        "Bearer é",
    ):
        answer = await api.request("GET", "/v1/events", headers={"Authorization": value})
        assert answer.problem == (401, "unauthorized"), value
        bodies.add(json.dumps(answer.body))
    answer = await api.get("/v1/events?access_token=good")
    assert answer.problem == (401, "unauthorized")
    bodies.add(json.dumps(answer.body))
    assert len(bodies) == 1
    twice = b"GET /v1/events HTTP/1.1\r\nHost: x\r\n" + b"Authorization: Bearer good\r\n" * 2 + b"\r\n"
    assert (await api.raw(twice)).startswith(b"HTTP/1.1 401 ")
    assert (await api.request("GET", "/v1/events", headers={"Authorization": "bearer good"})).status == 200
    assert "good" not in "".join(api.daemon.output_lines())


async def test_without_tokens_only_loopback_is_allowed(make_daemon: MakeDaemon) -> None:
    """Another listening address without tokens is a configuration error: exit 78, in one line."""
    daemon = make_daemon(api={"listen": "0.0.0.0:8470"})
    daemon.launch()
    assert await daemon.ended() == 78
    [line] = daemon.output_lines()
    assert "api.listen" in line


async def test_without_tokens_other_origins_are_rejected(api: Client) -> None:
    """A page of another origin, or with a name that resolves to this machine, gets 403."""
    for headers in (
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
    ):
        answer = await api.request("GET", "/v1/events", headers=headers)
        assert answer.problem == (403, "forbidden"), headers


async def test_tokens_from_the_environment(make_daemon: MakeDaemon, session: aiohttp.ClientSession) -> None:
    """WEBHOOKD_API_TOKENS is the list as JSON."""
    daemon = make_daemon()
    daemon.environment["WEBHOOKD_API_TOKENS"] = json.dumps(tokens({"secret": ("read",)}))
    api = Client(session, await daemon.start())
    assert (await api.get("/v1/events")).status == 401
    assert (await api.as_token("secret").get("/v1/events")).status == 200
    assert (await api.as_token("secret").event()).status == 403
