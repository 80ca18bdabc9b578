"""A client of a daemon's HTTP API: asks as a program would, and gives what came back as a value."""

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


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: Any
    headers: Any

    @property
    def code(self) -> str:
        """The code of a problem, which must be one."""
        assert self.headers["Content-Type"] == "application/problem+json", self
        assert self.body["status"] == self.status
        assert self.body["detail"]
        return str(self.body["code"])

    @property
    def told(self) -> tuple[int, str]:
        return self.status, self.code


class Client:
    """Asks a daemon, with a token or without."""

    def __init__(
        self, session: aiohttp.ClientSession, daemon: DaemonProcess, token: str | None = None
    ) -> None:
        self.daemon = daemon
        self._session = session
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def as_token(self, token: str) -> "Client":
        return Client(self._session, self.daemon, token)

    async def ask(self, method: str, path: str, **request: Any) -> Answer:
        """Anything."""
        headers = self._headers | request.pop("headers", {})
        url = f"http://127.0.0.1:{self.daemon.port}{path}"
        async with self._session.request(method, url, headers=headers, **request) as answer:
            text = await answer.read()
            is_json = "json" in answer.headers.get("Content-Type", "")
            return Answer(answer.status, json.loads(text) if is_json and text else text, answer.headers)

    async def get(self, path: str) -> Answer:
        return await self.ask("GET", path)

    async def post(self, path: str, body: Any = None) -> Answer:
        return await self.ask("POST", path, **({} if body is None else {"json": body}))

    async def patch(self, path: str, body: Any) -> Answer:
        return await self.ask("PATCH", path, json=body)

    async def send(self, body: bytes, path: str = "/v1/events") -> Answer:
        """These very bytes."""
        return await self.ask("POST", path, data=body, headers=JSON)

    async def event(self, **fields: Any) -> Answer:
        return await self.post("/v1/events", {"event_type": EVENT_TYPE, "payload": {}} | fields)

    async def subscribe(self, endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
        """A verified subscription, made and verified through the API."""
        endpoint.echo_challenge()
        asked = {"event_type": EVENT_TYPE, "callback_url": endpoint.url("/hook")} | fields
        created = await self.post("/v1/subscriptions", asked)
        assert created.status == 201, created
        verified = await self.post(f"/v1/subscriptions/{created.body['id']}/verify")
        assert verified.status == 200, verified
        body: dict[str, Any] = created.body
        return body

    async def pages(self, path: str, limit: int) -> list[list[int]]:
        """The ids of each page of a list."""
        found = []
        cursor = ""
        while True:
            mark = "&" if "?" in path else "?"
            answer = await self.get(f"{path}{mark}limit={limit}{cursor}")
            assert answer.status == 200, answer
            assert set(answer.body) == {"items", "next_cursor"}
            found.append([item["id"] for item in answer.body["items"]])
            if answer.body["next_cursor"] is None:
                return found
            cursor = f"&cursor={answer.body['next_cursor']}"

    async def raw(self, data: bytes) -> bytes:
        """All that comes back for these bytes, until the daemon ends the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.daemon.port)
        try:
            writer.write(data)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), CONDITION_TIMEOUT_SECONDS)
        finally:
            writer.close()


def tokens(scopes: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """For api.tokens: each token is what it is called, and has these scopes."""
    return [
        {"name": token, "sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": list(allowed)}
        for token, allowed in scopes.items()
    ]


def is_time(text: str) -> bool:
    """Whether it is RFC 3339 in UTC."""
    return text.endswith("Z") and datetime.fromisoformat(text).utcoffset() is not None
