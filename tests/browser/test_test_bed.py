"""The checks of the browser tests pass for a good page, and each fails for a page with one fault."""

import signal
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tests.browser.conftest import Visit
from tests.browser.visitor import NARROW, VIEWS, View, Visitor
from tests.flow.conftest import MakeDaemon

POLICY = "default-src 'none'; style-src 'self'; img-src 'self' data:"
TEMPLATE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>A page</title>
<link rel="icon" href="data:,"></head>
<body><main><h1>A page</h1>{content}</main>{end}</body></html>"""
# With JavaScript and without, because the checks work differently.
BOTH = pytest.mark.parametrize("view", [View(), View(javascript=False)], ids=str)


class Site:
    """A server whose pages a test writes."""

    def __init__(self) -> None:
        self.content = ""
        self.end = ""
        self.policy = POLICY
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        text = TEMPLATE.format(content=self.content, end=self.end)
        headers = {"Content-Security-Policy": self.policy}
        status = 404 if request.path == "/missing" else 200
        return web.Response(text=text, status=status, content_type="text/html", headers=headers)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """Listen on a free port."""
    site = Site()
    application = web.Application()
    application.router.add_get("/{path:.*}", site.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield site
    await runner.cleanup()


@pytest.mark.parametrize("view", VIEWS, ids=str)
async def test_pages_of_a_daemon_fit(visitor: Visitor) -> None:
    """The pages fit into the window, and load nothing from elsewhere."""
    for path in ("/", "/docs"):
        await visitor.open(path)
        await visitor.assert_no_overflow()


async def test_documentation_is_accessible(visitor: Visitor) -> None:
    """It has 9,000 elements, for which axe-core needs 12 seconds of CPU time: so in one view only."""
    await visitor.open("/docs")
    await visitor.assert_accessible()


@BOTH
@pytest.mark.nightly
async def test_good_page_passes(site: Site, visit: Visit, view: View) -> None:
    """A page without a fault has no problem."""
    visitor = await visit(site.url, view)
    await visitor.open("/")
    await visitor.check()
    assert await visitor.unexpected() == []


@BOTH
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("content", "directive"),
    [
        ('<p style="color: black">Text</p>', "style-src-attr"),
        ("<style>p { color: black }</style>", "style-src-elem"),
        ('<img src="http://other.example/image.png" alt="">', "img-src"),
        ('<iframe src="/" title="frame"></iframe>', "frame-src"),
    ],
)
async def test_violation_of_the_policy_is_a_problem(
    site: Site, visit: Visit, view: View, content: str, directive: str
) -> None:
    """Code and files that the policy forbids are found, also without JavaScript."""
    site.content = content
    visitor = await visit(site.url, view)
    await visitor.open("/")
    assert any(problem.startswith(f"policy: {directive} blocked") for problem in await visitor.unexpected())
    visitor.problems.clear()


@pytest.mark.nightly
async def test_inline_script_is_a_problem(site: Site, visit: Visit) -> None:
    """A script that the policy blocks is found; its effect does not happen."""
    site.content = "<script>document.title = 'Changed'</script><button onclick='x()'>Press</button>"
    visitor = await visit(site.url)
    await visitor.open("/")
    assert await visitor.page.title() == "A page"
    found = " ".join(await visitor.unexpected())
    assert "policy: script-src-elem" in found
    assert "policy: script-src-attr" in found
    visitor.problems.clear()


@BOTH
@pytest.mark.nightly
async def test_request_to_another_host_is_a_problem(site: Site, visit: Visit, view: View) -> None:
    """A request that the policy allows is found, and reaches no other host."""
    site.policy = "default-src * data:"
    site.content = '<img src="http://other.example/image.png" alt="">'
    visitor = await visit(site.url, view)
    await visitor.open("/")
    assert [problem.partition(": ")[0] for problem in await visitor.unexpected()] == [
        "request to another host",
        "console error",
    ]
    visitor.problems.clear()


@pytest.mark.nightly
async def test_errors_of_scripts_are_problems(site: Site, visit: Visit) -> None:
    """Uncaught exceptions, logged errors, WebSockets elsewhere and failed requests are found."""
    site.policy = "default-src * data: 'unsafe-inline'"
    site.end = """<script>
        console.error("logged"); new WebSocket("ws://other.example/live"); fetch("/missing");
        setTimeout(() => { throw new Error("thrown") });
    </script>"""
    visitor = await visit(site.url)
    await visitor.open("/")
    await visitor.page.wait_for_load_state("networkidle")
    found = " ".join(await visitor.unexpected())
    for text in ("console error: logged", "other host: ws://other", "status of 404", "exception: thrown"):
        assert text in found
    visitor.problems.clear()


@BOTH
@pytest.mark.nightly
async def test_expected_problems(site: Site, visit: Visit, view: View) -> None:
    """An expected problem counts once, and one that did not happen is a problem."""
    visitor = await visit(site.url, view)
    await visitor.open("/missing", 404)
    assert await visitor.unexpected() == []
    visitor.expect("never")
    assert await visitor.unexpected() == ["expected, but did not happen: never"]
    visitor._expected.clear()
    assert "status of 404" in " ".join(await visitor.unexpected())
    visitor.problems.clear()


@BOTH
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("<input>", "label (critical): <input>"),
        ('<img src="data:,">', "image-alt (critical)"),
        ("<table><tr><th></th></tr></table>", "empty-table-header (minor)"),
    ],
)
async def test_inaccessible_page_fails(site: Site, visit: Visit, view: View, content: str, rule: str) -> None:
    """The message names the rule and the element."""
    site.content = content
    visitor = await visit(site.url, view)
    await visitor.open("/")
    with pytest.raises(AssertionError, match="is not accessible") as failure:
        await visitor.assert_accessible()
    assert rule in str(failure.value)


@BOTH
@pytest.mark.nightly
async def test_low_contrast_fails(site: Site, visit: Visit, view: View) -> None:
    """axe-core computes the colours, so it has worked on the rendered page."""
    site.policy = "style-src 'unsafe-inline'; img-src data:"
    site.content = '<p style="color: #bbb; background: white">Text</p>'
    visitor = await visit(site.url, view)
    await visitor.open("/")
    with pytest.raises(AssertionError, match="color-contrast"):
        await visitor.assert_accessible()


@BOTH
@pytest.mark.nightly
async def test_overflow_fails(site: Site, visit: Visit, view: View) -> None:
    """A word that does not fit is found and named; one in its own scroll bar is fine."""
    site.policy = "style-src 'unsafe-inline'; img-src data:"
    narrow = View(NARROW, view.javascript)
    site.content = f"<p>{'wide' * 100}</p>"
    visitor = await visit(site.url, narrow)
    await visitor.open("/")
    with pytest.raises(AssertionError, match="px wide:\n<p>widewide"):
        await visitor.assert_no_overflow()
    site.content = f'<pre tabindex="0" style="overflow: auto">{"wide" * 100}</pre>'
    await visitor.open("/")
    await visitor.assert_no_overflow()


async def test_daemons_of_a_test_stop_after_its_windows(visit: Visit, make_daemon: MakeDaemon) -> None:
    """A page may still load something, such as its icon, when a test ends. That is no problem of the page."""
    daemon = await make_daemon().start()
    visitor = await visit(daemon)
    await visitor.open("/")
    daemon.process.send_signal(signal.SIGSTOP)
    async with visitor.page.expect_request("**/icon.svg?late"):
        await visitor.page.evaluate("void fetch('/assets/icon.svg?late')")


@pytest.mark.nightly
async def test_visitors_share_no_cookies(site: Site, visit: Visit) -> None:
    """Two visitors of a test are two sessions."""
    first, second = await visit(site.url), await visit(site.url)
    await first.page.context.add_cookies([{"name": "session", "value": "1", "url": site.url}])
    assert len(await first.page.context.cookies()) == 1
    assert await second.page.context.cookies() == []
