"""Counts how many requests an endpoint has open at once."""

import asyncio
from collections import Counter

from tests.support.endpoint import Connection, Request

OK = 200


class OpenRequests:
    """A behaviour for `endpoint.behave` that holds and counts requests; can be changed at any time."""

    def __init__(self, status: int | None, hold_seconds: float = 0) -> None:
        self.status = status  # None: held until the client closes
        self.hold_seconds = hold_seconds
        self.open = 0
        self.most_open = 0
        self.answered_ok: Counter[str] = Counter()  # by webhook-id

    async def __call__(self, request: Request, connection: Connection) -> bool:
        """Hold, then answer. A request counts as open until its response is sent."""
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.hold_seconds)
            if self.status is None:
                await connection.reader.read()
                return False
            if self.status == OK:
                self.answered_ok[request.headers["webhook-id"]] += 1
            await connection.send(f"HTTP/1.1 {self.status} X\r\nContent-Length: 0\r\n\r\n".encode())
            return True
        finally:
            self.open -= 1
