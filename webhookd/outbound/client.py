"""The guarded HTTPS client: one request in, one Outcome out, within one deadline.

Reads ClientOptions, which a reload swaps. Hands every dial to the guard. Only cancellation leaves it as an
exception: a hostile endpoint, a bad URL and a bug of ours are all outcomes of that one request.

No proxies, no cookies, no redirects, no decompression: there is no code for them.
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
from webhookd.outbound.addresses import AddressPolicy, IPAddress
from webhookd.outbound.connections import Connections
from webhookd.outbound.dialling import Dialler
from webhookd.outbound.exchange import Answer
from webhookd.outbound.guard import Counters, Guard
from webhookd.outbound.names import Lookup, Names, SystemLookup
from webhookd.outbound.outcome import SUCCESS, Failure, Outcome, Unanswered
from webhookd.outbound.retry_after import retry_after_seconds
from webhookd.outbound.target import head_of, target_of

log = logging.getLogger(__name__)

# Beside those of deliveries, so that a subscription can be verified under full load.
VERIFICATION_CONNECTIONS = 16


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
        self._names = Names(lookup or SystemLookup())
        self._connections = self._connections_by(options)
        self._retired: list[Connections] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def reconfigure(self, options: ClientOptions) -> None:
        """Send every further request by these options, over connections made under them.

        Requests in flight end as they began; then the connections of their time are closed.
        """
        self._connections.retire()
        self._retired = [old for old in (*self._retired, self._connections) if not old.is_closed]
        self._connections = self._connections_by(options)

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, deadline_seconds: float
    ) -> Outcome:
        """Send one request, once. The deadline covers everything from the lookup to the body's last byte."""
        started = time.monotonic()
        deadline = asyncio.get_running_loop().time() + deadline_seconds
        try:
            target = target_of(url)
            head = head_of(target, headers, len(body))
            answer = await self._connections.request(target.origin, head, body, deadline)
        except TimeoutError:
            return _failed(Failure.TIMEOUT, started)
        except Unanswered as unanswered:
            return _failed(unanswered.failure, started, unanswered.detail)
        except Exception:
            log.exception("a request could not be made")
            return _failed(Failure.INTERNAL, started)
        return _answered(answer, _milliseconds_since(started))

    def close(self) -> None:
        """Close every connection, also under requests in flight."""
        for connections in (*self._retired, self._connections):
            connections.close()
        self._names.close()

    def _connections_by(self, options: ClientOptions) -> Connections:
        """A policy's connections are its own: none of an earlier one's is used under it."""
        guard = Guard(options.policy, options.own_addresses, self.counters)
        dialler = Dialler(guard, self._names, options.tls)
        return Connections(dialler, options.max_connections, options.max_response_bytes)


def _answered(answer: Answer, duration_ms: int) -> Outcome:
    if answer.status in SUCCESS:
        return Outcome(answer.status, None, duration_ms, None, answer.excerpt)
    retry_after = retry_after_seconds(
        answer.header(b"retry-after"), answer.header(b"date"), datetime.now(UTC)
    )
    return Outcome(answer.status, f"HTTP_{answer.status}", duration_ms, retry_after, answer.excerpt)


def _failed(failure: Failure, started: float, detail: str = "") -> Outcome:
    return Outcome(None, failure.value, _milliseconds_since(started), detail=detail)


def _milliseconds_since(started: float) -> int:
    return int((time.monotonic() - started) * 1000)
