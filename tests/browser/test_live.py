"""The live page and its stream: in a browser, and as a client that reads and does not read."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from playwright.async_api import expect

from tests.browser.conftest import Visit
from tests.browser.sites import Site
from tests.browser.visitor import NARROW, VIEWS, View
from tests.flow.conftest import MakeApi, MakeDaemon
from tests.support.api import tokens
from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Endpoint
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS

EACH_VIEW = pytest.mark.parametrize("view", VIEWS, ids=str)


class Stream:
    """A client that reads the stream."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.last_id = ""

    async def next(self) -> tuple[str, Any]:
        """Return the name and the content of the next event."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            async for line in self.response.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    fields[name] = value
                elif "data" in fields:
                    self.last_id = fields.get("id", self.last_id)
                    return fields.get("event", "message"), json.loads(fields["data"])
        return "closed", None

    async def attempts(self, count: int) -> list[dict[str, Any]]:
        """Return so many attempts, each as it was sent last."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < count or any(
            item["outcome"] in ("Waiting", "Being sent") for item in found.values()
        ):
            name, content = await self.next()
            assert name == "message", name
            found |= {item["id"]: item for item in content["items"]}
        return list(found.values())


@asynccontextmanager
async def streaming(
    session: aiohttp.ClientSession, daemon: DaemonProcess, query: str = "", **headers: str
) -> AsyncIterator[Stream]:
    """Connect to the stream."""
    url = f"http://127.0.0.1:{daemon.port}/live/stream{query}"
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        assert response.status == 200, await response.text()
        yield Stream(response)


async def test_stream_has_its_headers_and_continues(
    make_api: MakeApi, endpoint: Endpoint, session: aiohttp.ClientSession
) -> None:
    """It is not stored or collected on the way. A second connection gets only what the first did not."""
    api = await make_api()
    await api.subscribe(endpoint, tenant="acme")
    async with streaming(session, api.daemon) as stream:
        headers = stream.response.headers
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Accel-Buffering"] == "no"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert (await api.event(tenant="acme")).status == 202
        [first] = await stream.attempts(1)
        assert (first["outcome"], first["tenant"], first["answer"]) == ("Delivered", "acme", 200)
        assert first["url"] == endpoint.url("/hook")
        last_id = stream.last_id
    assert (await api.event(tenant="acme")).status == 202
    async with streaming(session, api.daemon, **{"Last-Event-ID": last_id}) as stream:
        [second] = await stream.attempts(1)
        assert second["delivery"] != first["delivery"]
    async with streaming(session, api.daemon, "?last_event_id=0000.5") as stream:
        assert (await stream.next())[0] == "gap"
    for query in ("?tenant=globex", "?status=Failed", "?event_type=other", "?subscription_id=999"):
        async with streaming(session, api.daemon, query) as stream:
            assert await stream.next() == ("message", {"items": [], "more": 0}), query
    async with streaming(session, api.daemon, "?tenant=acme&status=Completed&subscription_id=1") as stream:
        assert len(await stream.attempts(2)) == 2
    for query in ("?status=Done", "?subscription_id=x", "?tenant=a%20b"):
        url = f"http://127.0.0.1:{api.daemon.port}/live/stream{query}"
        async with session.get(url) as response:
            assert response.status == 422, query


async def test_stream_needs_a_session_of_this_site(
    make_daemon: MakeDaemon, session: aiohttp.ClientSession
) -> None:
    """Without a login it leads to the login; from a page of another site it is refused."""
    open_daemon = await make_daemon().start()
    url = f"http://127.0.0.1:{open_daemon.port}/live/stream"
    async with session.get(url, headers={"Sec-Fetch-Site": "cross-site"}) as response:
        assert response.status == 403
    daemon = make_daemon(api={"tokens": tokens({"all": ("read",), "jobs": ("jobs",)})})
    daemon.token = "all"
    await daemon.start()
    url = f"http://127.0.0.1:{daemon.port}/live/stream"
    async with session.get(url, allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (303, "/login?next=%2Flive%2Fstream")


async def test_streams_end_with_the_daemon(make_api: MakeApi, session: aiohttp.ClientSession) -> None:
    """They do not hold up the shutdown, and more than the limit are refused."""
    api = await make_api()
    async with streaming(session, api.daemon) as stream:
        await stream.next()
        api.daemon.sigterm()
        assert await stream.next() == ("closed", None)
        assert await api.daemon.ended() == 0


async def test_logout_ends_the_streams_of_the_session(make_daemon: MakeDaemon, visit: Visit) -> None:
    """Also one in another tab, which then says so."""
    daemon = make_daemon(api={"tokens": tokens({"all": ("read",)})})
    daemon.token = "all"
    await daemon.start()
    visitor = await visit(daemon)
    await visitor.open("/login?next=/live")
    await visitor.page.fill("input[name=token]", "all")
    await visitor.page.click("button:has-text('Log in')")
    state = visitor.page.locator("#live-state")
    await expect(state).to_have_text("Live")
    token = await visitor.page.input_value("header input[name=form_token]")
    answer = await visitor.page.request.post(
        f"{visitor.base_url}/logout", form={"form_token": token}, max_redirects=0
    )
    assert answer.status == 303
    await expect(state).to_have_text("Your session has ended: log in again")


@EACH_VIEW
async def test_attempts_appear(visit: Visit, make_api: MakeApi, endpoint: Endpoint, view: View) -> None:
    """By the script as they happen. Without it, a link starts and stops reloading the page."""
    api = await make_api()
    await api.subscribe(endpoint, tenant="acme")
    visitor = await visit(api.daemon, view)
    page = visitor.page
    await visitor.open("/live")
    await visitor.check()
    assert "No attempts yet" in await page.inner_text("#content")
    row = page.locator("#live tbody tr")
    assert (await api.event(tenant="acme")).status == 202
    if view.javascript:
        await expect(page.locator("#live-state")).to_have_text("Live")
        await expect(row).to_have_count(1)
        await expect(row.locator("td").first).to_have_text("Delivered")
    else:
        await page.click("a:has-text('Reload every 5 seconds')")
        assert (await api.event(tenant="acme")).status == 202
        await expect(row).to_have_count(2, timeout=20_000)
        await page.click("a:has-text('Stop')")
    await visitor.check()
    assert await row.last.locator("a").first.get_attribute("href") == "/deliveries/1"
    await page.fill("input[name=tenant]", "globex")
    await page.click("button:has-text('Filter')")
    assert "No attempt matches yet" in await page.inner_text("#content")
    await visitor.open("/live?subscription_id=x", 422)


async def test_paused_page_waits(make_api: MakeApi, endpoint: Endpoint, visit: Visit) -> None:
    """What came meanwhile is shown at once when the page continues; the key p does the same."""
    api = await make_api()
    await api.subscribe(endpoint)
    visitor = await visit(api.daemon)
    page = visitor.page
    state, row = page.locator("#live-state"), page.locator("#live tbody tr")
    await visitor.open("/live")
    await expect(state).to_have_text("Live")
    await page.click("#live-pause")
    await expect(state).to_have_text("Paused")
    assert (await api.event()).status == 202
    await expect(state).to_have_text("Paused, some waiting")
    await expect(row).to_have_count(0)
    await visitor.check()
    await page.keyboard.press("p")
    await expect(row).to_have_count(1)
    await expect(state).to_have_text("Live")


@pytest.mark.parametrize("view", [View(), View(NARROW, scheme="dark")], ids=str)
async def test_page_keeps_a_bounded_number_of_rows(
    make_api: MakeApi, endpoint: Endpoint, visit: Visit, view: View
) -> None:
    """After 500 attempts it has 200 rows, each once, the newest first."""
    api = await make_api()
    await api.subscribe(endpoint)
    visitor = await visit(api.daemon, view)
    page = visitor.page
    await visitor.open("/live")
    await expect(page.locator("#live-state")).to_have_text("Live")
    for _ in range(5):
        events = [{"event_type": "order.created", "payload": 1}] * 100
        assert (await api.post("/v1/events/batch", {"events": events})).status == 202
        await asyncio.sleep(1)
    newest = page.locator("#live tbody tr[data-id='500']")
    await expect(newest).to_be_visible()
    rows = "rows => rows.map(row => Number(row.dataset.id || 0))"
    shown = await page.eval_on_selector_all("#live tbody tr", rows)
    assert len(shown) == 200
    ids = [row_id for row_id in shown if row_id]
    assert ids == sorted(set(ids), reverse=True)
    assert ids[0] == 500


@EACH_VIEW
async def test_live_page_with_hostile_data(visit: Visit, hostile: Site, view: View) -> None:
    """Everything is text, in the rows of the server and in those of the script."""
    visitor = await visit(hostile.daemon, view)
    await visitor.open("/live")
    if view.javascript:
        await expect(visitor.page.locator("#live-state")).to_have_text("Live")
    await visitor.check()
    assert await visitor.page.title() != "owned"
