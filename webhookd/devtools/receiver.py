"""An HTTPS receiver on this machine, for `listen` and `demo`: verifies each request and decides the answer.

It does what every receiver should do: it accepts only what is signed, and answers the challenge.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeAlias

import anyio
import msgspec
from aiohttp import web

from webhookd.core.errors import CannotListen
from webhookd.outbound.signatures import SignatureProblem, challenge_in, verify

HOST = "127.0.0.1"
# Duplicates are recognised among this many recent messages.
MAX_REMEMBERED = 10_000
# The largest payload that the database accepts, and so the largest that can be delivered.
MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_SECONDS = 30.0
SHUTDOWN_SECONDS = 1.0
SUCCESS = range(200, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and its answer."""

    received_at: datetime
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    checked: bool  # whether the signature was verified
    problem: SignatureProblem | None  # why the signature is not valid
    duplicate: bool  # the same message was accepted before
    status: int
    challenge: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether the daemon counts it as delivered."""
        return self.status in SUCCESS


# Passes an arrival on, and returns the status and the body of the answer.
Forward: TypeAlias = Callable[[Arrival], Awaitable[tuple[int, bytes]]]


@dataclass(slots=True)
class _Message:
    requests: int = 0
    accepted: bool = False


@dataclass(slots=True)
class ReceivedWebhooks:
    """Decides how requests are answered. `secrets` and `status` may change at any time."""

    # If false, every request is accepted. If true, only those signed with one of the secrets.
    verifies: bool = True
    secrets: list[str] = field(default_factory=list)
    # The number of attempts of each message that fail on purpose before one succeeds.
    failures: int = 0
    # The status of a failure. Set without `failures`, it is the answer to every request.
    status: int | None = None
    _messages: OrderedDict[str, _Message] = field(default_factory=OrderedDict)

    def receive(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, received_at: datetime
    ) -> Arrival:
        """Verify a request and choose its answer."""
        problem = verify(self.secrets, headers, body, received_at.timestamp()) if self.verifies else None
        challenge, duplicate = None, False
        if method != "POST":
            status: int = HTTPStatus.METHOD_NOT_ALLOWED
        elif problem is not None:
            status = HTTPStatus.UNAUTHORIZED
        elif (challenge := challenge_in(body)) is not None:
            status = HTTPStatus.OK
        else:
            message = self._message(headers.get("webhook-id", ""))
            message.requests += 1
            duplicate = message.accepted
            status = HTTPStatus.OK
            if message.requests <= self.failures or (self.status is not None and not self.failures):
                status = self.status or HTTPStatus.INTERNAL_SERVER_ERROR
            message.accepted |= status in SUCCESS
        return Arrival(
            received_at=received_at,
            method=method,
            path=path,
            headers=headers,
            body=body,
            checked=self.verifies,
            problem=problem,
            duplicate=duplicate,
            status=status,
            challenge=challenge,
        )

    def take_back(self, arrival: Arrival) -> None:
        """Forget that a message was accepted: the application that it was forwarded to failed."""
        self._message(arrival.headers.get("webhook-id", "")).accepted = False

    def _message(self, message_id: str) -> _Message:
        """The earlier requests of this message. A message without an id is always new."""
        if not message_id:
            return _Message()
        message = self._messages.setdefault(message_id, _Message())
        self._messages.move_to_end(message_id)
        if len(self._messages) > MAX_REMEMBERED:
            self._messages.popitem(last=False)
        return message


@asynccontextmanager
async def receiving(
    port: int,
    tls: ssl.SSLContext,
    received: ReceivedWebhooks,
    on_arrival: Callable[[Arrival], None],
    delay_seconds: float = 0.0,
    forward: Forward | None = None,
) -> AsyncIterator[str]:
    """Receive on this port, or on a free one if it is 0, until the block ends. Yields the URL.

    With `forward`, it decides the answer to what was accepted.
    """

    async def handle(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                body = await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        headers = {name.lower(): value for name, value in request.headers.items()}
        arrival = received.receive(request.method, request.path_qs, headers, body, datetime.now(UTC))
        answer = b"" if arrival.challenge is None else msgspec.json.encode({"challenge": arrival.challenge})
        if forward is not None and arrival.accepted and arrival.challenge is None:
            status, answer = await forward(arrival)
            arrival = replace(arrival, status=status)
            if not arrival.accepted:
                received.take_back(arrival)
        on_arrival(arrival)
        await asyncio.sleep(delay_seconds)
        return web.Response(status=arrival.status, body=answer, content_type="application/json")

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", handle)
    # webhookd never compresses a payload: show a compressed body as it came.
    runner = web.AppRunner(app, access_log=None, auto_decompress=False, shutdown_timeout=SHUTDOWN_SECONDS)
    listening = _listen(port)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, ssl_context=tls).start()
        yield f"https://{HOST}:{listening.getsockname()[1]}/"
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        hint = "; choose another port with --port" if error.errno == errno.EADDRINUSE else ""
        reason = os.strerror(error.errno or 0)
        raise CannotListen(f"cannot listen on {HOST}:{port}: {reason}{hint}") from error
