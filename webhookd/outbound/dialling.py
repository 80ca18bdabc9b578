"""From an origin to a verified TLS connection: looks the name up, asks the guard, dials, shakes hands.

Each way to fail has its name here, where it is known at which step it happened.
"""

import asyncio
import errno
import logging
import re
import socket
import ssl
from ipaddress import ip_address

import aiohappyeyeballs

from webhookd.outbound.exchange import Exchange
from webhookd.outbound.guard import AddressBlocked, AddressInfo, Guard
from webhookd.outbound.names import Names
from webhookd.outbound.outcome import Failure, Unanswered
from webhookd.outbound.target import Origin

log = logging.getLogger(__name__)

# Closing TLS in order waits for the peer's goodbye, by default half a minute: an endpoint that answers
# garbage at once, and then stays silent, could hold thousands of our sockets.
_GOODBYE_SECONDS = 0.1
_SHORTEST_HANDSHAKE_SECONDS = 0.001  # it must be above 0
# How long the first address has alone before the next is dialled beside it (RFC 8305).
_NEXT_ADDRESS_SECONDS = 0.25
# The resolver reads a name that ends so as an address: 127.1, 2130706433. Nobody who means it well writes it.
_NUMBER_FOR_A_HOST = re.compile(r"(?:.*\.)?[0-9]+\.?")
# No more files, memory or ports here: says nothing of the endpoint.
_OUR_WANT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)


class Dialler:
    """Dials under one policy, with trust in some authorities."""

    def __init__(self, guard: Guard, names: Names, tls: ssl.SSLContext) -> None:
        self._guard = guard
        self._names = names
        self._tls = tls

    async def dial(self, origin: Origin, max_response_bytes: int, deadline: float) -> Exchange:
        """A connection to an origin, or Unanswered. The caller bounds the time.

        The deadline (the loop's time) is for the handshake, which has by default one of its own: who gives up
        before leaves it to that, and the connection is closed when it ends.
        """
        loop = asyncio.get_running_loop()
        dialled = await self._connect(await self._addresses(origin))
        handshake = loop.create_task(
            loop.create_connection(
                lambda: Exchange(loop, max_response_bytes),
                sock=dialled,
                ssl=self._tls,
                server_hostname=origin.host.rstrip("."),
                ssl_handshake_timeout=max(_SHORTEST_HANDSHAKE_SECONDS, deadline - loop.time()),
                ssl_shutdown_timeout=_GOODBYE_SECONDS,
            )
        )
        try:
            # Not cancelled with us: in a turn in which the endpoint answered, as when the process was
            # stopped, uvloop would close the socket under its TLS and log a fatal error.
            await asyncio.wait({handshake})
            _, exchange = handshake.result()
        except asyncio.CancelledError:
            handshake.add_done_callback(_hang_up)
            raise
        except ConnectionAbortedError:  # so a handshake ends that took too long
            raise TimeoutError from None
        except ssl.SSLCertVerificationError as error:
            raise Unanswered(Failure.TLS_FAILED, error.verify_message) from None
        except ssl.SSLError as error:
            raise Unanswered(Failure.TLS_FAILED, error.reason or "") from None
        except OSError as error:  # lost in the handshake
            raise Unanswered(Failure.TLS_FAILED, error.strerror or "") from None
        return exchange

    async def _addresses(self, origin: Origin) -> list[AddressInfo]:
        try:
            ip_address(origin.host)
        except ValueError:
            pass
        else:
            return [_info(origin.host, origin.port)]  # judged when its socket is made
        if _NUMBER_FOR_A_HOST.fullmatch(origin.host):
            raise Unanswered(Failure.ADDRESS_BLOCKED, "a number for a host")
        answers = await self._names.addresses(*origin)
        try:
            return [_info(answer, origin.port) for answer in self._guard.permitted(answers, origin.port)]
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
            if error.errno in _OUR_WANT:
                log.exception("a connection could not be made")
                raise Unanswered(Failure.INTERNAL, error.strerror or "") from None
            raise Unanswered(Failure.CONNECT_FAILED, error.strerror or "") from None
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return dialled


def _hang_up(handshake: "asyncio.Task[tuple[asyncio.Transport, Exchange]]") -> None:
    if not handshake.cancelled() and handshake.exception() is None:
        handshake.result()[0].abort()


def _blocked(error: AddressBlocked) -> Unanswered:
    return Unanswered(Failure.ADDRESS_BLOCKED, error.strerror or "")


def _info(address: str, port: int) -> AddressInfo:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    rest = (0, 0) if family == socket.AF_INET6 else ()
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, *rest)
