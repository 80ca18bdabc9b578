"""From an origin to a verified TLS connection: DNS lookup, guard, dial, TLS handshake.

Each step maps its errors to a Failure.
"""

import asyncio
import errno
import logging
import re
import socket
import ssl
from ipaddress import ip_address

import aiohappyeyeballs

from webhookd.outbound.addresses import AddressBlocked, AddressInfo, Guard
from webhookd.outbound.exchange import Exchange
from webhookd.outbound.names import Names
from webhookd.outbound.outcome import Failure, RequestFailed
from webhookd.outbound.urls import Origin

log = logging.getLogger(__name__)

# An orderly TLS shutdown waits for the peer's close_notify, by default 30 s: an endpoint that answers garbage
# and then stays silent could hold thousands of our sockets.
_TLS_SHUTDOWN_SECONDS = 0.1
_MIN_HANDSHAKE_SECONDS = 0.001  # asyncio rejects 0
# The first address gets this long before the next is dialled in parallel (RFC 8305).
_NEXT_ADDRESS_SECONDS = 0.25
# The resolver reads such a name as an address: 127.1, 2130706433. There is no legitimate use for it.
_NUMERIC_HOST = re.compile(r"(?:.*\.)?[0-9]+\.?")
# This machine has no file descriptors, memory or ports left: not the endpoint's fault.
_LOCAL_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)


class Dialler:
    """Dials under one address policy and one set of trusted authorities."""

    def __init__(self, guard: Guard, names: Names, tls: ssl.SSLContext) -> None:
        self._guard = guard
        self._names = names
        self._tls = tls

    async def dial(self, origin: Origin, max_response_bytes: int, deadline: float) -> Exchange:
        """Connect to an origin; RequestFailed if that is not possible. The caller bounds the time.

        The deadline (loop time) replaces the handshake's own default timeout. If the caller gives up earlier,
        the handshake continues in the background, and its connection is closed when it ends.
        """
        loop = asyncio.get_running_loop()
        dialled = await self._connect(await self._addresses(origin))
        handshake = loop.create_task(
            loop.create_connection(
                lambda: Exchange(loop, max_response_bytes),
                sock=dialled,
                ssl=self._tls,
                server_hostname=origin.host.rstrip("."),
                ssl_handshake_timeout=max(_MIN_HANDSHAKE_SECONDS, deadline - loop.time()),
                ssl_shutdown_timeout=_TLS_SHUTDOWN_SECONDS,
            )
        )
        try:
            # Not cancelled with the caller: if the endpoint answers in the same loop iteration (for example
            # after the process was stopped), uvloop closes the socket under TLS and logs a fatal error.
            await asyncio.wait({handshake})
            _, exchange = handshake.result()
        except asyncio.CancelledError:
            handshake.add_done_callback(_abort)
            raise
        except ConnectionAbortedError:  # asyncio's handshake timeout
            raise TimeoutError from None
        except ssl.SSLCertVerificationError as error:
            raise RequestFailed(Failure.TLS_FAILED, error.verify_message) from None
        except ssl.SSLError as error:
            raise RequestFailed(Failure.TLS_FAILED, error.reason or "") from None
        except OSError as error:  # the connection was lost during the handshake
            raise RequestFailed(Failure.TLS_FAILED, error.strerror or "") from None
        return exchange

    async def _addresses(self, origin: Origin) -> list[AddressInfo]:
        try:
            ip_address(origin.host)
        except ValueError:
            pass
        else:
            return [_info(origin.host, origin.port)]  # make_socket checks it
        if _NUMERIC_HOST.fullmatch(origin.host):
            raise RequestFailed(Failure.ADDRESS_BLOCKED, "a number as a host")
        resolved = await self._names.addresses(*origin)
        try:
            return [_info(address, origin.port) for address in self._guard.permitted(resolved, origin.port)]
        except AddressBlocked as error:
            raise _blocked(error) from None

    async def _connect(self, addresses: list[AddressInfo]) -> socket.socket:
        try:
            dialled = await aiohappyeyeballs.start_connection(
                addresses,
                happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS,
                interleave=1,
                socket_factory=self._guard.make_socket,
            )
        except AddressBlocked as error:
            raise _blocked(error) from None
        except OSError as error:
            if error.errno in _LOCAL_SHORTAGE:
                log.exception("this machine cannot open a connection")
                raise RequestFailed(Failure.INTERNAL, error.strerror or "") from None
            raise RequestFailed(Failure.CONNECT_FAILED, error.strerror or "") from None
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return dialled


def _abort(handshake: "asyncio.Task[tuple[asyncio.Transport, Exchange]]") -> None:
    if not handshake.cancelled() and handshake.exception() is None:
        handshake.result()[0].abort()


def _blocked(error: AddressBlocked) -> RequestFailed:
    return RequestFailed(Failure.ADDRESS_BLOCKED, error.strerror or "")


def _info(address: str, port: int) -> AddressInfo:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    rest = (0, 0) if family == socket.AF_INET6 else ()
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, *rest)
