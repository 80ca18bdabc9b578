"""The guarded HTTPS client: one request in, one Outcome out, within one deadline.

Reads ClientOptions, which a reload swaps. Hands every dial to the guard. Only cancellation leaves it as an
exception: a hostile endpoint, a bad URL and a bug of ours are all outcomes of that one request.
"""

import asyncio
import errno
import io
import logging
import math
import re
import ssl
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Self

import aiohttp
from yarl import URL

from webhookd import __version__
from webhookd.model.errors import ConfigurationError
from webhookd.outbound.addresses import AddressPolicy, IPAddress
from webhookd.outbound.guard import AddressBlocked, Counters, Guard, GuardedResolver, Lookup, SystemLookup
from webhookd.outbound.outcome import Failure, Outcome, answered, failed
from webhookd.outbound.retry_after import retry_after_seconds

log = logging.getLogger(__name__)

# Beside those of deliveries, so that a subscription can be verified under full load.
VERIFICATION_CONNECTIONS = 16
EXCERPT_BYTES = 4096  # as the column's check

# Under the 5 s after which Node and Apache close an idle connection: a request that meets the closing is a
# failed attempt, for nothing is sent twice.
_KEEPALIVE_SECONDS = 4.0
# Closing TLS in order waits for the peer's goodbye, by default half a minute: an endpoint that answers
# garbage at once, and then stays silent, could hold thousands of our sockets.
_GOODBYE_SECONDS = 0.1
# Long enough for a burst of new connections to one name, too short to matter when DNS changes.
_DNS_CACHE_SECONDS = 5
_MAX_HEADER_LINE_BYTES = 8190
_MAX_HEADER_LINES = 128
_READ_BYTES = 8192
_LOST = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
_LARGE_BODY_BYTES = 1024 * 1024
_STATUSES = range(100, 600)
_SWITCHING_PROTOCOLS = 101

# The API stores nothing else; but a row may come from elsewhere, and what is sent is sent as it is.
_SENDABLE_URL = re.compile(r"https://[!-~]+")

_HEADERS = {
    "user-agent": f"webhookd/{__version__}",
    "content-type": "application/json",
    "accept": "*/*",
    # Nothing here decompresses: a bomb stays the bytes that it is.
    "accept-encoding": "identity",
}


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What a reload may change. All that can fail is done: the CA file is read, the networks are parsed."""

    policy: AddressPolicy
    tls: ssl.SSLContext
    own_addresses: frozenset[tuple[IPAddress, int]] = frozenset()
    # Read on past the excerpt, for a connection whose answer was read to its end can be used again.
    max_response_bytes: int = 64 * 1024
    max_connections: int = 1000


def trusted_tls(*ca_files: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer, verified against the system's authorities and those of the files. Reads them."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for ca_file in ca_files:
        try:
            context.load_verify_locations(cafile=ca_file)
        except ValueError as error:
            raise ConfigurationError(f"delivery.ca_file {str(ca_file)!r} is no name of a file") from error
        except OSError as error:  # ssl.SSLError is one
            reason = "no certificate is in it" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigurationError(f"delivery.ca_file {ca_file} cannot be used: {reason}") from error
    return context


class GuardedClient:
    """Sends requests over connections it keeps alive. Make it, use it and close it in one event loop."""

    def __init__(self, options: ClientOptions, lookup: Lookup | None = None) -> None:
        self.counters = Counters()
        self._lookup: Lookup = lookup or SystemLookup()
        self._generation = _Generation(options, self._lookup, self.counters)
        self._retiring: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def reconfigure(self, options: ClientOptions) -> None:
        """Send every further request by these options, over connections made under them.

        Requests in flight end as they began; then the connections of their time are closed.
        """
        retired, self._generation = self._generation, _Generation(options, self._lookup, self.counters)
        task = asyncio.get_running_loop().create_task(retired.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, deadline_seconds: float
    ) -> Outcome:
        """Send one request, once. The deadline covers everything from the lookup to the body's last byte."""
        generation = self._generation
        generation.enter()
        try:
            return await _exchange(generation, url, headers, body, deadline_seconds)
        finally:
            generation.leave()

    async def close(self) -> None:
        """Close every connection, also under requests in flight."""
        await self._generation.close()
        for task in list(self._retiring):
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)


class _Generation:
    """The session and the connections made under one set of options: a policy's pool is its own."""

    def __init__(self, options: ClientOptions, lookup: Lookup, counters: Counters) -> None:
        self.options = options
        guard = Guard(options.policy, options.own_addresses, counters)
        self.session = aiohttp.ClientSession(
            connector=_connector(options, guard, lookup),
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            max_line_size=_MAX_HEADER_LINE_BYTES,
            max_field_size=_MAX_HEADER_LINE_BYTES,
            max_headers=_MAX_HEADER_LINES,
            read_bufsize=_READ_BYTES,
        )
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    async def retire(self) -> None:
        """Close when the last request has ended, or at once when cancelled."""
        try:
            await self._idle.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        await self.session.close()


def _connector(options: ClientOptions, guard: Guard, lookup: Lookup) -> aiohttp.TCPConnector:
    with warnings.catch_warnings():
        # ssl_shutdown_timeout goes in aiohttp 4, and has no other name before it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return aiohttp.TCPConnector(
            resolver=GuardedResolver(guard, lookup),
            socket_factory=guard.make_socket,
            ssl=options.tls,
            ssl_shutdown_timeout=_GOODBYE_SECONDS,
            limit=options.max_connections,
            keepalive_timeout=_KEEPALIVE_SECONDS,
            # Also joins lookups of one name: a name that DNS never answers takes one thread, not all.
            use_dns_cache=True,
            ttl_dns_cache=_DNS_CACHE_SECONDS,
        )


async def _exchange(
    generation: _Generation, url: str, headers: Mapping[str, str], body: bytes, deadline_seconds: float
) -> Outcome:
    started = time.monotonic()
    response: aiohttp.ClientResponse | None = None
    failure, detail = Failure.INTERNAL, ""
    excerpt = bytearray()
    read_to_end = False
    try:
        response = await generation.session.post(
            _parsed(url),
            headers=headers,
            data=_sendable(body),
            allow_redirects=False,
            timeout=_deadline(deadline_seconds),
        )
        read_to_end = await _read(response, excerpt, generation.options.max_response_bytes)
    except TimeoutError:
        failure = Failure.TIMEOUT
    except Exception as error:
        failure, detail = _failure(error), _detail(error)
        if failure is Failure.INTERNAL:
            log.exception("a request could not be made")
        # aiohttp keeps an error in a variable of a frame of its traceback: a circle, and the body is in it.
        for one in (error, error.__cause__, error.__context__):
            if one is not None:
                one.__traceback__ = None
    finally:
        if response is not None and read_to_end:
            response.release()
        elif response is not None:
            response.close()  # with an unread body there is nothing more to be had from the connection
    duration_ms = int((time.monotonic() - started) * 1000)
    if response is None:
        return failed(failure, duration_ms, detail)
    if response.status not in _STATUSES:
        return failed(Failure.PROTOCOL_ERROR, duration_ms)
    # The status decides. What became of the body after it changes nothing.
    retry_after = retry_after_seconds(
        response.headers.get("retry-after"), response.headers.get("date"), datetime.now(UTC)
    )
    return answered(response.status, duration_ms, retry_after, bytes(excerpt))


@cache
def _deadline(seconds: float) -> aiohttp.ClientTimeout:
    """One deadline from the lookup to the body's last byte. Exactly: a longer one is rounded up by default.

    There are as many as there were values of one setting, so few.
    """
    return aiohttp.ClientTimeout(
        total=seconds, connect=None, sock_connect=None, sock_read=None, ceil_threshold=math.inf
    )


def _parsed(url: str) -> URL:
    if not _SENDABLE_URL.fullmatch(url):
        raise ValueError("the subscription's URL is none that could have been stored through the API")
    return URL(url, encoded=True)


def _sendable(body: bytes) -> bytes | io.BytesIO:
    """Large bodies in pieces: written in one, they would hold up the loop (aiohttp warns of it)."""
    return body if len(body) <= _LARGE_BODY_BYTES else io.BytesIO(body)


async def _read(response: aiohttp.ClientResponse, excerpt: bytearray, max_response_bytes: int) -> bool:
    """Keep the body's beginning; tell whether its end was seen within the bound."""
    if response.status == _SWITCHING_PROTOCOLS:
        return False
    left = max_response_bytes
    while left > 0:
        chunk = await response.content.read(min(left, _READ_BYTES))
        if not chunk:
            return True
        excerpt += chunk[: EXCERPT_BYTES - len(excerpt)]
        left -= len(chunk)
        if response.content.at_eof():
            return True
    return False


# In this order: a DNS error is a connector's error, that a connection's. Of a response error the status is
# aiohttp's invention. A URL that it refuses has a number for a host, such as 127.1.
_FAILURES = (
    (aiohttp.ClientConnectorDNSError, Failure.DNS_FAILED),
    (aiohttp.ClientSSLError, Failure.TLS_FAILED),
    (aiohttp.ClientConnectionError, Failure.CONNECT_FAILED),
    (aiohttp.ClientResponseError, Failure.PROTOCOL_ERROR),
    (aiohttp.ClientPayloadError, Failure.PROTOCOL_ERROR),
    (aiohttp.InvalidUrlClientError, Failure.ADDRESS_BLOCKED),
)


# No more files or memory here: says nothing of the endpoint.
_OUR_WANT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def _failure(error: Exception) -> Failure:
    """What an exception says of the endpoint."""
    cause = getattr(error, "os_error", None) or error.__cause__
    if isinstance(cause, AddressBlocked):
        return Failure.ADDRESS_BLOCKED
    if isinstance(cause, OSError) and cause.errno in _OUR_WANT:
        return Failure.INTERNAL
    # In TLS 1.3 a refusal may come after the handshake, as the end of the connection. And what the connector
    # loses, it loses in the handshake: before it there was no connection, and after it is no more its own.
    if isinstance(cause, ssl.SSLError) or (
        isinstance(error, aiohttp.ClientConnectorError) and isinstance(cause, _LOST)
    ):
        return Failure.TLS_FAILED
    return next((failure for kind, failure in _FAILURES if isinstance(error, kind)), Failure.INTERNAL)


def _detail(error: Exception) -> str:
    """What the system said: of a certificate, of an errno, of a name. Nothing of what was sent to us."""
    cause = getattr(error, "os_error", None) or error.__cause__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return cause.verify_message
    if isinstance(cause, ssl.SSLError):
        return cause.reason or ""
    return cause.strerror or "" if isinstance(cause, OSError) else ""
