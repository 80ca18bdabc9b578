"""The pages of a running daemon: for whom, under what policy, and that they show this instance."""

import re
from typing import Any

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.support.api import Client, tokens
from tests.support.flow import Flow
from tests.unit.test_status_page import ParsedPage


async def test_pages_load_nothing_and_run_nothing(api: Client) -> None:
    """No script, no form, nothing from elsewhere; and a policy that would forbid it."""
    for path in ("/", "/docs"):
        answer = await api.get(path)
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


def path_of(template: str, operation: dict[str, Any]) -> str:
    """A path as the document shows it: with the id that is its example."""
    ids = [one["schema"]["examples"][0] for one in operation.get("parameters", []) if one["in"] == "path"]
    return template.replace("{id}", "".join(map(str, ids)))


async def test_the_docs_have_every_route(api: Client) -> None:
    """Each with its place, which its link leads to, a command to ask it, and its scope."""
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


async def test_the_docs_show_where_they_are_served_from(make_api: MakeApi) -> None:
    """The host as it was asked for, https behind a proxy that has it; never markup that a client sent."""
    api = await make_api(api={"tokens": tokens({"reader": ("read",)})})
    behind = {"Host": "hooks.example:8443", "X-Forwarded-Proto": "https"}
    for headers, expected in (
        (behind, "https://hooks.example:8443/v1/jobs"),
        ({"Host": "[::1]:8470"}, "http://[::1]:8470/v1/jobs"),
        ({"Host": "<b>$(x)"}, "http://127.0.0.1:8470/v1/jobs"),
    ):
        answer = await api.ask("GET", "/docs", headers=headers)
        assert expected in ParsedPage(answer.body.decode()).text, headers
        assert "$(x)" not in answer.body.decode()


async def test_the_status_page_needs_a_token_in_the_header(make_api: MakeApi) -> None:
    """Without it 401 and a page that says how, not from a query; with it the page. The documents are open."""
    api = await make_api(api={"tokens": tokens({"reader": ("read",), "other": ("ingest",)})})
    for path in ("/", "/?token=reader", "/?access_token=reader"):
        refused = await api.get(path)
        assert refused.status == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        assert refused.headers["Content-Type"].startswith("text/html")
        assert "Authorization: Bearer" in ParsedPage(refused.body.decode()).text
    forbidden = await api.as_token("other").get("/")
    assert forbidden.status == 403
    assert "scope read" in ParsedPage(forbidden.body.decode()).text
    assert (await api.as_token("reader").get("/")).status == 200
    for path in ("/docs", "/openapi.json"):
        assert (await api.get(path)).status == 200
    assert "reader" not in "".join(api.daemon.said())


async def test_without_tokens_a_foreign_page_may_not_read_the_status(api: Client) -> None:
    """As for every route: another origin, and a name that resolves to this machine, are refused."""
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        assert (await api.ask("GET", "/", headers=headers)).status == 403


async def test_the_status_page_shows_this_instance(flow: Flow, make_daemon: MakeDaemon) -> None:
    """What waits here is on the page as soon as /status has it."""
    await flow.publish()
    await flow.publish()
    daemon = await make_daemon(services={"enabled": ["api"]}).start()
    await daemon.until(lambda: daemon.get_json("/status")["backlog"], "seen")
    text = ParsedPage(daemon.get("/")[1].decode()).text
    assert text.startswith("\nwebhookd: ready")
    assert "routing2" in text
