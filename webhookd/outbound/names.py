"""Names to addresses: asked of the machine's resolver, once for all who want to know at a time.

Judges nothing: the guard does, each time an answer is used.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from webhookd.outbound.outcome import Failure, Unanswered

# getaddrinfo blocks a thread until it gives up, long after our deadline: a name that DNS never answers keeps
# one, so there are many. Lookups of one name are one.
_LOOKUP_THREADS = 512
# Long enough for a burst of new connections to one name, too short to matter when DNS changes.
_KEPT_SECONDS = 5.0
_MAX_KEPT = 4096

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


class Names:
    """Asks through a lookup, joins who asks for the same name, and remembers the answer for a moment."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._asked: dict[tuple[str, int], asyncio.Task[list[str]]] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """The answers, each once, never none. A lookup goes on for others when one gives up waiting."""
        key = (host, port)
        asked = self._asked.get(key)
        if asked is None:
            if len(self._asked) >= _MAX_KEPT:
                self.forget()
            asked = asyncio.get_running_loop().create_task(self._ask(host, port))
            self._asked[key] = asked
            asked.add_done_callback(lambda done: self._answered(key, done))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            if not asked.cancelled():
                raise
            raise Unanswered(Failure.INTERNAL, "the client is closed") from None  # it is not we who were
        except UnicodeError:
            raise Unanswered(Failure.DNS_FAILED, "no name that DNS could hold") from None
        except OSError as error:  # socket.gaierror is one
            raise Unanswered(Failure.DNS_FAILED, error.strerror or "") from None

    def forget(self) -> None:
        """Ask again for every name that comes; what is being asked is answered to those who wait."""
        self._asked.clear()

    def close(self) -> None:
        """Ask nothing more."""
        for asked in self._asked.values():
            asked.cancel()
        self._asked.clear()

    async def _ask(self, host: str, port: int) -> list[str]:
        answers = list(dict.fromkeys(await self._lookup(host, port)))
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return answers

    def _answered(self, key: tuple[str, int], done: "asyncio.Task[list[str]]") -> None:
        if done.cancelled() or done.exception() is not None:
            self._drop(key, done)
        else:
            asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._drop, key, done)

    def _drop(self, key: tuple[str, int], done: "asyncio.Task[list[str]]") -> None:
        if self._asked.get(key) is done:
            del self._asked[key]


class SystemLookup:
    """The machine's own resolver: a thread for each name, for getaddrinfo cannot be told to give up."""

    def __init__(self) -> None:
        self._threads = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        if self._threads >= _LOOKUP_THREADS:
            raise socket.gaierror(socket.EAI_AGAIN, "too many names are being looked up")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()

        def look_up() -> None:
            try:
                found: list[str] | Exception = _look_up(host, port)
            except Exception as error:  # it is whoever asked that is to see it
                found = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._hand_over, answer, found)

        # Not of a pool: the interpreter waits at its end for a pool's threads, also for one that hangs.
        threading.Thread(target=look_up, name="webhookd-dns", daemon=True).start()
        self._threads += 1  # and not of one that could not be started; it is counted down by this loop
        return await answer

    def _hand_over(self, answer: "asyncio.Future[list[str]]", found: list[str] | Exception) -> None:
        self._threads -= 1
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)


def _look_up(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [_with_zone(*address) for *_, address in infos]


def _with_zone(host: Any, _port: Any, _flow: Any = 0, scope: Any = 0) -> str:
    """An answer as text, with the interface that a link-local one is of: the policy is to see that."""
    return f"{host}%{scope}" if scope and "%" not in host else str(host)
