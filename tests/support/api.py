"""A client of the HTTP API of a daemon."""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import aiohttp

from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS

JSON = {"Content-Type": "application/json"}


class ApiResponse(NamedTuple):
    """A response of the API, with its parsed body."""

    status: int
    body: Any
    headers: Any

    @property
    def code(self) -> str:
        """Return the error code; the response must be a problem document."""
        assert self.headers["Content-Type"] == "application/problem+json", self
        assert self.body["status"] == self.status
        assert self.body["detail"]
        return str(self.body["code"])

    @property
    def problem(self) -> tuple[int, str]:
        """Return status and error code."""
        return self.status, self.code


class Client:
    """Sends requests to a daemon, with a token or without."""

    def __init__(
        self, session: aiohttp.ClientSession, daemon: DaemonProcess, token: str | None = None
    ) -> None:
        self.daemon = daemon
        self._session = session
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def as_token(self, token: str) -> "Client":
        return Client(self._session, self.daemon, token)

    async def request(self, method: str, path: str, **options: Any) -> ApiResponse:
        headers = self._headers | options.pop("headers", {})
        url = f"http://127.0.0.1:{self.daemon.port}{path}"
        # Not followed: a redirect is the answer, and its address is a part of it.
        options.setdefault("allow_redirects", False)
        async with self._session.request(method, url, headers=headers, **options) as response:
            text = await response.read()
            is_json = "json" in response.headers.get("Content-Type", "")
            return ApiResponse(
                response.status, json.loads(text) if is_json and text else text, response.headers
            )

    async def get(self, path: str) -> ApiResponse:
        return await self.request("GET", path)

    async def post(self, path: str, body: Any = None) -> ApiResponse:
        return await self.request("POST", path, **({} if body is None else {"json": body}))

    async def patch(self, path: str, body: Any) -> ApiResponse:
        return await self.request("PATCH", path, json=body)

    async def send(self, body: bytes, path: str = "/v1/events") -> ApiResponse:
        """POST these bytes as JSON."""
        return await self.request("POST", path, data=body, headers=JSON)

    async def event(self, **fields: Any) -> ApiResponse:
        return await self.post("/v1/events", {"event_type": EVENT_TYPE, "payload": {}} | fields)

    async def subscribe(self, endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
        """Create and verify a subscription through the API."""
        endpoint.echo_challenge()
        body = {"event_type": EVENT_TYPE, "callback_url": endpoint.url("/hook")} | fields
        created = await self.post("/v1/subscriptions", body)
        assert created.status == 201, created
        verified = await self.post(f"/v1/subscriptions/{created.body['id']}/verify")
        assert verified.status == 200, verified
        subscription: dict[str, Any] = created.body
        return subscription

    async def pages(self, path: str, limit: int) -> list[list[int]]:
        """Return the ids of each page of a list."""
        found = []
        cursor = ""
        while True:
            separator = "&" if "?" in path else "?"
            response = await self.get(f"{path}{separator}limit={limit}{cursor}")
            assert response.status == 200, response
            assert set(response.body) == {"items", "next_cursor"}
            found.append([item["id"] for item in response.body["items"]])
            if response.body["next_cursor"] is None:
                return found
            cursor = f"&cursor={response.body['next_cursor']}"

    async def raw(self, data: bytes) -> bytes:
        """Send these bytes, and return everything until the daemon closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.daemon.port)
        try:
            writer.write(data)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), CONDITION_TIMEOUT_SECONDS)
        finally:
            writer.close()


def tokens(scopes: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return a value for api.tokens, in which each token equals its name."""
    return [
        {"name": token, "sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": list(allowed)}
        for token, allowed in scopes.items()
    ]


def is_time(text: str) -> bool:
    """Return whether it is an RFC 3339 time in UTC."""
    return text.endswith("Z") and datetime.fromisoformat(text).utcoffset() is not None
