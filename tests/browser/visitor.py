"""One visitor of the pages: a browser window with its own cookies, and a list of all its problems.

Takes a Browser and the address of a daemon. Problems are errors in the browser's console, uncaught
exceptions, violations of the Content-Security-Policy, and requests to other hosts. The fixtures of
conftest.py assert that there are none.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.async_api import expect

from tests.support.waiting import CONDITION_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Response

# A condition, not a time: a slow machine may take longer.
expect.set_options(timeout=CONDITION_TIMEOUT_SECONDS * 1000)

Scheme = Literal["light", "dark"]

WIDE, NARROW = 1400, 390
HEIGHTS = {WIDE: 900, NARROW: 844}
AXE = resources.files("axe_playwright_python").joinpath("axe.min.js")
# Every rule of WCAG 2.0 to 2.2, levels A and AA, and axe's best practices.
AXE_OPTIONS = {"resultTypes": ["violations"], "preload": False}
# Chromium runs no timers in a page without JavaScript, and axe-core yields by them.
TIMERS_WITHOUT_JAVASCRIPT = """() => {
    window.setTimeout = callback => { Promise.resolve().then(callback); return 0; };
}"""
# The innermost elements whose box or text ends right of the window. One with its own scroll bar is fine.
WIDER_THAN_WINDOW = """() => {
    const width = document.documentElement.clientWidth;
    const end = element => {
        const box = element.getBoundingClientRect();
        if (!box.width || !box.height) return 0;
        // The text of a field scrolls inside of it.
        if (element.matches('input, textarea')) return box.right;
        return Math.max(box.right, box.left + element.scrollWidth);
    };
    const scrolls = element => {
        for (; element && element !== document.body; element = element.parentElement) {
            if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(element).overflowX)) return true;
        }
        return false;
    };
    const wide = [...document.body.querySelectorAll('*')]
        .filter(element => end(element) > width + 1 && !scrolls(element));
    const innermost = wide.filter(
        element => !wide.some(other => other !== element && element.contains(other)));
    const name = element => `${element.outerHTML.slice(0, 150)} ends at ${Math.round(end(element))} px`;
    return {
        scrollWidth: document.documentElement.scrollWidth,
        innerWidth: window.innerWidth,
        found: innermost.map(name),
    };
}"""


@dataclass(frozen=True)
class View:
    """What a visitor sees the pages with."""

    width: int = WIDE
    javascript: bool = True
    scheme: Scheme = "light"

    def __str__(self) -> str:
        return f"{self.width}-{self.scheme}" + ("" if self.javascript else "-no-javascript")


# Each width, each colour scheme, with and without JavaScript at least once in the gate; the rest at night.
VIEWS = (
    View(),
    View(NARROW, javascript=False, scheme="dark"),
    pytest.param(View(NARROW), marks=pytest.mark.nightly),
    pytest.param(View(javascript=False), marks=pytest.mark.nightly),
)


class Visitor:
    """A window of the browser that remembers its problems."""

    def __init__(self, page: "Page", base_url: str, view: View) -> None:
        self.page = page
        self.base_url = base_url
        self.view = view
        self.problems: list[str] = []
        self._expected: list[str] = []
        self._policy_issues: Any = None

    # Pages.

    async def open(self, path: str, status: int = 200) -> "Response":
        """Load a page of the daemon, which must answer with this status."""
        if status >= 400:
            self.expect(f"the server responded with a status of {status}")
        response = await self.page.goto(path)
        assert response is not None, f"{path} has no response"
        assert response.status == status, f"{path}: status {response.status}, not {status}"
        return response

    def expect(self, text: str) -> None:
        """Expect one problem that contains this text; the test fails if there is none."""
        self._expected.append(text)

    # Checks.

    async def check(self) -> None:
        """Assert that the current page is accessible and fits into the window."""
        await self.assert_accessible()
        await self.assert_no_overflow()

    async def assert_accessible(self) -> None:
        """Assert that axe-core finds no violation of its rules in the current page."""
        found = await self.violations()
        assert not found, f"{self.page.url} at {self.view} is not accessible:\n" + "\n".join(found)

    async def violations(self) -> list[str]:
        """Return axe-core's complaints, one for each element."""
        # Evaluated by the debugger, which the policy of the page neither blocks nor reports.
        if not self.view.javascript:
            await self.page.evaluate(TIMERS_WITHOUT_JAVASCRIPT)
        await self.page.evaluate(AXE.read_text("utf-8") + "\n;null")
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            result = await self.page.evaluate(f"() => axe.run(document, {json.dumps(AXE_OPTIONS)})")
        return [
            f"{rule['id']} ({rule['impact']}): {node['html'][:300]}\n    {_indented(node['failureSummary'])}"
            for rule in result["violations"]
            for node in rule["nodes"]
        ]

    async def assert_no_overflow(self) -> None:
        """Assert that nothing is wider than the window, so that no one has to scroll sideways."""
        seen = await self.page.evaluate(WIDER_THAN_WINDOW)
        wide = "\n".join(seen["found"][:5])
        assert seen["scrollWidth"] <= seen["innerWidth"] and not wide, (  # noqa: PT018  one sentence for both
            f"{self.page.url} at {self.view} is {seen['scrollWidth']} px wide:\n{wide}"
        )

    async def unexpected(self) -> list[str]:
        """Return the problems that were not expected, and the expected ones that did not happen."""
        if not self.page.is_closed():
            # Everything that the page has reported arrives before the answer to this.
            await self._policy_issues.send("Audits.enable")
            await self.page.evaluate("null")
        left = list(self.problems)
        missing = []
        for text in self._expected:
            match = next((problem for problem in left if text in problem), None)
            if match is None:
                missing.append(f"expected, but did not happen: {text}")
            else:
                left.remove(match)
        return left + missing

    # Internal.

    async def watch(self, context: "BrowserContext") -> None:
        """Collect the problems of the page from now on."""
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"uncaught exception: {error}"))
        self.page.on("websocket", lambda socket: self._on_address(socket.url))
        context.on("request", self._on_request)
        # The debugger reports violations of the policy also without JavaScript.
        self._policy_issues = await context.new_cdp_session(self.page)
        self._policy_issues.on("Audits.issueAdded", self._on_issue)
        await self._policy_issues.send("Audits.enable")

    def _on_console(self, message: "ConsoleMessage") -> None:
        # A violation of the policy is an issue too, which says more.
        if message.type in {"error", "warning"} and "Content Security Policy" not in message.text:
            where = message.location.get("url", "")
            self.problems.append(f"console {message.type}: {message.text} ({where})")

    def _on_issue(self, event: dict[str, Any]) -> None:
        details = event["issue"]["details"].get("contentSecurityPolicyIssueDetails")
        if details:
            place = details.get("sourceCodeLocation", {})
            self.problems.append(
                f"policy: {details['violatedDirective']} blocked {details.get('blockedURL', 'inline code')}"
                f" at {place.get('url')}:{place.get('lineNumber')}:{place.get('columnNumber')}"
            )

    def _on_request(self, request: "Request") -> None:
        self._on_address(request.url)

    def _on_address(self, url: str) -> None:
        address, own = urlsplit(url), urlsplit(self.base_url)
        if address.scheme not in {"data", "blob", "about"} and address.netloc != own.netloc:
            self.problems.append(f"request to another host: {url}")


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


@asynccontextmanager
async def visiting(browser: "Browser", base_url: str, view: View) -> "AsyncIterator[Visitor]":
    """Open a window without cookies for the block. Its problems are not checked here."""
    context = await browser.new_context(
        base_url=base_url,
        viewport={"width": view.width, "height": HEIGHTS.get(view.width, HEIGHTS[WIDE])},
        java_script_enabled=view.javascript,
        color_scheme=view.scheme,
        reduced_motion="reduce",
        locale="en-GB",
        timezone_id="UTC",
    )
    context.set_default_timeout(CONDITION_TIMEOUT_SECONDS * 1000)
    try:
        visitor = Visitor(await context.new_page(), base_url, view)
        await visitor.watch(context)
        yield visitor
    finally:
        await context.close()
