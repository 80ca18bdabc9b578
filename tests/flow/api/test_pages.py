"""The pages of a running daemon: access, security headers, and content."""

import re
from typing import Any

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.support.api import Client, tokens
from tests.support.flow import Flow
from tests.support.html import ParsedPage


async def test_docs_page_has_no_scripts_and_loads_nothing(api: Client) -> None:
    """No script, no form, no external resource, and a Content-Security-Policy that blocks them."""
    answer = await api.get("/docs")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    seen = ParsedPage(answer.body.decode())
    assert not {"script", "iframe", "object", "embed", "form", "img"} & seen.tags
    loaded = [attributes["href"] for tag, attributes in seen.elements if tag == "link"]
    assert [str(address)[:5] for address in loaded] == ["data:"]
    followed = [str(attributes["href"]) for tag, attributes in seen.elements if tag == "a"]
    assert all(re.match(r"[/#](?!/)", address) for address in followed), followed


async def test_console_pages_load_only_from_this_daemon(api: Client) -> None:
    """The script, the style sheet and the icon are this daemon's, and the policy allows nothing else."""
    answer = await api.get("/")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    seen = ParsedPage(answer.body.decode())
    assert not {"iframe", "object", "embed", "style"} & seen.tags
    addresses = [attributes.get("href") or attributes.get("src") for _, attributes in seen.elements]
    assert all(re.match(r"[/#](?!/)", address) for address in addresses if address), addresses
    assert not [name for _, attributes in seen.elements for name in attributes if name.startswith("on")]
    assets = [address for address in addresses if address and address.startswith("/assets/")]
    assert len(assets) == 3
    for address in assets:
        loaded = await api.get(address)
        assert (loaded.status, loaded.headers["X-Content-Type-Options"]) == (200, "nosniff"), address


def path_of(template: str, operation: dict[str, Any]) -> str:
    """Return a path with the example id of the document."""
    ids = [one["schema"]["examples"][0] for one in operation.get("parameters", []) if one["in"] == "path"]
    return template.replace("{id}", "".join(map(str, ids)))


async def test_docs_page_has_every_route(api: Client) -> None:
    """Each route has an anchor that its link leads to, an example command, and its scope."""
    document = (await api.get("/openapi.json")).body
    seen = ParsedPage((await api.get("/docs")).body.decode())
    places = {attributes["id"] for _, attributes in seen.elements if attributes.get("id")}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["operationId"] in places
            assert f"{method.upper()}{path}" in seen.text, path
            assert f"http://127.0.0.1:{api.daemon.port}{path_of(path, operation)}" in seen.text
    links = {attributes["href"] for tag, attributes in seen.elements if tag == "a"}
    assert {link[1:] for link in links if link and link.startswith("#")} <= places


async def test_docs_page_shows_the_requested_address(make_api: MakeApi) -> None:
    """The requested host, https behind a TLS proxy, and never markup from a client."""
    api = await make_api(api={"tokens": tokens({"reader": ("read",)})})
    behind = {"Host": "hooks.example:8443", "X-Forwarded-Proto": "https"}
    for headers, expected in (
        (behind, "https://hooks.example:8443/v1/jobs"),
        ({"Host": "[::1]:8470"}, "http://[::1]:8470/v1/jobs"),
        ({"Host": "<b>$(x)"}, "http://127.0.0.1:8470/v1/jobs"),
    ):
        answer = await api.request("GET", "/docs", headers=headers)
        assert expected in ParsedPage(answer.body.decode()).text, headers
        assert "$(x)" not in answer.body.decode()


async def test_console_needs_a_login_or_a_token_in_the_header(make_api: MakeApi) -> None:
    """Without a token, or with one in the query, the login form; /docs and /openapi.json are open."""
    api = await make_api(api={"tokens": tokens({"reader": ("read",), "other": ("ingest",)})})
    for path in ("/", "/?token=reader", "/?access_token=reader"):
        refused = await api.get(path)
        assert refused.status == 303
        assert refused.headers["Location"].startswith("/login")
    assert (await api.as_token("wrong").get("/")).status == 303
    forbidden = await api.as_token("other").get("/")
    assert forbidden.status == 403
    assert "scope read" in ParsedPage(forbidden.body.decode()).text
    assert (await api.as_token("reader").get("/")).status == 200
    for path in ("/docs", "/openapi.json"):
        assert (await api.get(path)).status == 200
    assert "reader" not in "".join(api.daemon.output_lines())


async def test_without_tokens_other_origins_cannot_read_the_status(api: Client) -> None:
    """Another origin, and a foreign name that resolves to this machine, are rejected on every route."""
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        assert (await api.request("GET", "/", headers=headers)).status == 403


async def test_overview_shows_waiting_work(flow: Flow, make_daemon: MakeDaemon) -> None:
    """The page shows the backlog as soon as /status has it."""
    await flow.publish()
    await flow.publish()
    daemon = await make_daemon(services={"enabled": ["api"]}).start()
    await daemon.until(lambda: daemon.get_json("/status")["backlog"], "seen")
    text = ParsedPage(daemon.get("/")[1].decode()).text
    assert "Ready" in text
    assert re.search(r"Events to route\s*The router creates their deliveries\.\s*2\s", text), text
