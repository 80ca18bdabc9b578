"""The POST that every Python contender does: aiohttp over kept-alive TLS connections, the answer read.

As many headers, of the same lengths, as a delivery of webhookd has.
"""

import ssl
import time

import aiohttp
from yarl import URL

from tests.bench.scale import CONCURRENCY

HEADERS = {
    "user-agent": "webhookd/0.0.0",
    "content-type": "application/json",
    "accept": "*/*",
    "accept-encoding": "identity",
}


class Poster:
    """Posts to one address."""

    def __init__(self, url: str, ca_file: str) -> None:
        self._url = URL(url)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=ssl.create_default_context(cafile=ca_file), limit=CONCURRENCY, keepalive_timeout=60
            ),
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def post(self, number: int, body: bytes) -> None:
        """One delivery, which must be answered with 200."""
        headers = {
            "webhook-id": f"evt_{number}",
            "webhook-timestamp": str(int(time.time())),
            "webhook-signature": "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=",
            "webhook-event-type": "bench.n0",
            "webhook-attempt": "1",
        }
        async with self.session.post(self._url, headers=headers, data=body, allow_redirects=False) as answer:
            await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"the receiver answered {answer.status}")


class Countdown:
    """Tells when so many jobs were handled; a peer's own bookkeeping comes after it."""

    def __init__(self) -> None:
        self._left = 0

    def begin(self, count: int) -> None:
        self._left = count

    def handled(self) -> None:
        self._left -= 1

    @property
    def over(self) -> bool:
        return self._left <= 0
