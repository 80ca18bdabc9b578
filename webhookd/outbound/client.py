"""The guarded HTTPS client: one request in, one Outcome out, within one deadline.

Reads ClientOptions, which a reload replaces. Passes every dial to the guard. Cancellation is the only
exception that leaves it: a hostile endpoint, a bad URL and a bug in webhookd are outcomes of that request.

There is no code for proxies, cookies, redirects or decompression.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from webhookd.core.errors import ConfigurationError
from webhookd.outbound.addresses import AddressPolicy, DialCounters, Guard, IPAddress
from webhookd.outbound.connections import Connections
from webhookd.outbound.dialling import Dialler
from webhookd.outbound.exchange import Response
from webhookd.outbound.names import Lookup, Names, SystemLookup
from webhookd.outbound.outcome import SUCCESS, Failure, Outcome, RequestFailed, retry_after_seconds
from webhookd.outbound.urls import head_of, target_of

log = logging.getLogger(__name__)

# In addition to those of deliveries, so that a subscription can be verified under full load.
VERIFICATION_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Everything a reload may change. The CA file is already read and the networks are already parsed."""

    policy: AddressPolicy
    tls: ssl.SSLContext
    own_addresses: frozenset[tuple[IPAddress, int]] = frozenset()
    # More than the excerpt: a connection can be reused only if its response was read to the end.
    max_response_bytes: int = 64 * 1024
    max_connections: int = 1000


def trusted_tls(*ca_files: Path) -> ssl.SSLContext:
    """Make a context for TLS 1.2 or newer that trusts the system's authorities and those in the files."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for ca_file in ca_files:
        try:
            context.load_verify_locations(cafile=ca_file)
        except ValueError as error:
            raise ConfigurationError(f"delivery.ca_file {str(ca_file)!r} is not a file name") from error
        except OSError as error:  # ssl.SSLError is one
            reason = "it contains no certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigurationError(f"delivery.ca_file {ca_file} cannot be used: {reason}") from error
    return context


class GuardedClient:
    """Sends requests over keep-alive connections. Create, use and close it in one event loop."""

    def __init__(self, options: ClientOptions, lookup: Lookup | None = None) -> None:
        self.counters = DialCounters()
        self._names = Names(lookup or SystemLookup())
        self._connections = self._connections_for(options)
        self._retired: list[Connections] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def reconfigure(self, options: ClientOptions) -> None:
        """Use these options, and new connections, for every further request.

        Requests in flight keep the old options; the old connections are closed after the last of them.
        """
        self._connections.retire()
        self._retired = [old for old in (*self._retired, self._connections) if not old.is_closed]
        self._connections = self._connections_for(options)

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, deadline_seconds: float
    ) -> Outcome:
        """Send one request, once. The deadline covers everything from DNS lookup to the body's last byte."""
        started = time.monotonic()
        deadline = asyncio.get_running_loop().time() + deadline_seconds
        try:
            target = target_of(url)
            head = head_of(target, headers, len(body))
            response = await self._connections.request(target.origin, head, body, deadline)
        except TimeoutError:
            return _failed(Failure.TIMEOUT, started)
        except RequestFailed as failed:
            return _failed(failed.failure, started, failed.detail)
        except Exception:
            log.exception("internal error while sending a request")
            return _failed(Failure.INTERNAL, started)
        return _responded(response, _milliseconds_since(started))

    def close(self) -> None:
        """Close every connection, including those with a request in flight."""
        for connections in (*self._retired, self._connections):
            connections.close()
        self._names.close()

    def _connections_for(self, options: ClientOptions) -> Connections:
        """Each set of options has its own connections, so none was made under an older policy."""
        guard = Guard(options.policy, options.own_addresses, self.counters)
        dialler = Dialler(guard, self._names, options.tls)
        return Connections(dialler, options.max_connections, options.max_response_bytes)


def _responded(response: Response, duration_ms: int) -> Outcome:
    if response.status in SUCCESS:
        return Outcome(response.status, None, duration_ms, None, response.excerpt)
    retry_after = retry_after_seconds(
        response.header(b"retry-after"), response.header(b"date"), datetime.now(UTC)
    )
    return Outcome(response.status, f"HTTP_{response.status}", duration_ms, retry_after, response.excerpt)


def _failed(failure: Failure, started: float, detail: str = "") -> Outcome:
    return Outcome(None, failure.value, _milliseconds_since(started), detail=detail)


def _milliseconds_since(started: float) -> int:
    return int((time.monotonic() - started) * 1000)
