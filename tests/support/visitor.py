"""A visitor of the console or the portal without a browser: cookies, pages as text, and forms."""

import html
import re
from typing import Any, NamedTuple, Self

import aiohttp

from tests.support.api import Client
from tests.support.daemon import DaemonProcess
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS


class PageResponse(NamedTuple):
    """A page, or a redirect to one."""

    status: int
    text: str
    location: str

    @property
    def shown(self) -> str:
        """The text between the tags, as it is read."""
        return html.unescape(re.sub(r"<[^>]*>", "", self.text))


class HttpVisitor:
    """Requests pages of a daemon, and keeps the cookies that it sets."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._base = f"http://127.0.0.1:{daemon.port}"
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            timeout=aiohttp.ClientTimeout(CONDITION_TIMEOUT_SECONDS),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> PageResponse:
        """Request a page, without following a redirect."""
        return await self._request("GET", path)

    async def post(self, path: str, fields: dict[str, Any] | None = None, *, on: str = "/") -> PageResponse:
        """Send a form with the token of the page `on`. A list is sent as several fields."""
        token = re.search(r'name="form_token" value="([^"]*)"', (await self.get(on)).text)
        given = {"form_token": token[1] if token else ""} | (fields or {})
        return await self.post_fields(path, given)

    async def post_fields(self, path: str, fields: dict[str, Any]) -> PageResponse:
        """Send a form with these fields only."""
        pairs = [
            (name, str(each))
            for name, value in fields.items()
            for each in (value if isinstance(value, list) else [value])
        ]
        return await self._request("POST", path, data=aiohttp.FormData(pairs))

    async def log_in(self, token: str) -> None:
        """Open a session of a token."""
        response = await self.post_fields("/login", {"token": token})
        assert response.status == 303, response

    async def enter(self, api: Client, tenant: str, *capabilities: str) -> None:
        """Open a session of the portal by a link that the API makes."""
        made = await api.post(f"/v1/tenants/{tenant}/portal-link", {"capabilities": list(capabilities)})
        assert made.status == 201, made
        response = await self.post_fields("/portal/enter", {"code": made.body["url"].partition("code=")[2]})
        assert response.status == 303, response

    async def _request(self, method: str, path: str, **options: Any) -> PageResponse:
        async with self._session.request(
            method, self._base + path, allow_redirects=False, **options
        ) as response:
            text = await response.text()
            return PageResponse(response.status, text, response.headers.get("Location", ""))
