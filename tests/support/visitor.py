"""A visitor of the console or the portal without a browser: cookies, pages as text, and forms."""

import html
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from tests.support.api import Client
from tests.support.daemon import DaemonProcess

_TOKEN = re.compile(r'name="form_token" value="([^"]*)"')
_HIDDEN = re.compile(r'<input type="hidden" name="([a-z_]+)" value="([^"]*)">')
_TAGS = re.compile(r"<[^>]+>")


class Shown(NamedTuple):
    """A response to a visitor."""

    status: int
    html: str
    headers: Any
    set_cookies: dict[str, str]  # the complete Set-Cookie headers, by cookie

    @property
    def text(self) -> str:
        """The text that a person reads."""
        return html.unescape(" ".join(_TAGS.sub(" ", self.html).split()))

    @property
    def location(self) -> str:
        """The address that a redirect leads to, or an empty text."""
        return str(self.headers.get("Location", ""))

    @property
    def links(self) -> list[str]:
        """The addresses of links, forms, images, styles and scripts."""
        return [html.unescape(found) for found in re.findall(r'(?:href|action|src)="([^"]*)"', self.html)]

    def hidden(self, form: str) -> dict[str, str]:
        """Return the hidden fields of the form with this action."""
        for start, content in re.findall(r"<form([^>]*)>(.*?)</form>", self.html, re.DOTALL):
            if f'action="{form}"' in start:
                return {name: html.unescape(value) for name, value in _HIDDEN.findall(content)}
        raise AssertionError(f"no form for {form}")


class Visitor:
    """Keeps the cookies of one browser."""

    def __init__(self, session: aiohttp.ClientSession, daemon: DaemonProcess) -> None:
        self._session = session
        self._daemon = daemon
        self.cookies: dict[str, str] = {}

    async def request(self, method: str, path: str, **options: Any) -> Shown:
        url = f"http://127.0.0.1:{self._daemon.port}{path}"
        headers = dict(options.pop("headers", {}))
        if self.cookies:
            headers.setdefault("Cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))
        async with self._session.request(
            method, url, headers=headers, allow_redirects=False, **options
        ) as response:
            text = await response.text()
            given = response.headers.getall("Set-Cookie", [])
            set_cookies = {one.partition("=")[0]: one for one in given}
            for name, line in set_cookies.items():
                value = line.partition("=")[2].partition(";")[0].strip('"')
                self.cookies.pop(name, None)
                if value:
                    self.cookies[name] = value
            return Shown(response.status, text, response.headers, set_cookies)

    async def get(self, path: str) -> Shown:
        return await self.request("GET", path)

    async def post(self, path: str, fields: Mapping[str, object]) -> Shown:
        """Send a form with these fields only. A list is sent as several fields."""
        pairs = [
            (name, str(each))
            for name, value in fields.items()
            for each in (value if isinstance(value, list) else [value])
        ]
        return await self.request("POST", path, data=aiohttp.FormData(pairs))

    async def follow(self, shown: Shown) -> Shown:
        """Follow a redirect after an action."""
        assert shown.status == 303, (shown.status, shown.text)
        return await self.get(shown.headers["Location"])

    async def form_token(self, path: str) -> str:
        """Return the form token of this session, from a page that has a form."""
        page = await self.get(path)
        found = _TOKEN.search(page.html)
        assert found, (page.status, page.text)
        return found[1]

    async def submit(self, path: str, page: str, /, **fields: object) -> Shown:
        """Send a form of a page, with its token."""
        return await self.post(path, {"form_token": await self.form_token(page)} | fields)

    async def log_in(self, token: str) -> Shown:
        return await self.request("POST", "/login", data={"token": token})

    async def enter(self, url: str) -> Shown:
        """Open a link to the portal, and press its button."""
        code = urlsplit(url).query.removeprefix("code=")
        return await self.request("POST", "/portal/enter", data={"code": code})

    async def enter_by_link(self, api: Client, tenant: str, *capabilities: str) -> None:
        """Open a session of the portal by a link that the API makes."""
        made = await api.post(f"/v1/tenants/{tenant}/portal-link", {"capabilities": list(capabilities)})
        assert made.status == 201, made
        assert (await self.enter(made.body["url"])).status == 303
