"""The activity of an instance as server-sent events: one query for all clients, and bounds on everything.

A hub reads the newest attempts once a second, while at least one client is connected, and encodes them once
for each distinct filter. It keeps the last of them, so that a client that was disconnected for a moment
continues where it was. A client that reads too slowly loses messages, and gets a message about that.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.connection import Connection
from webhookd.http.responses import Problem, encoded
from webhookd.http.routes import QueryRunner

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
# Between two queries, also if a query takes longer than a tick.
MIN_PAUSE_SECONDS = 0.1
# The newest attempts of a tick. More cannot be read on a page that changes every second.
MAX_NEW = 200
# Attempts that were not finished when they were sent. Their results are sent too. A page shows 200 attempts,
# so the oldest of more than this are on no page any more.
MAX_WATCHED = 500
MAX_KEPT = 500
MAX_CLIENTS = 100
# Of one session, so that nobody can take the places of all others. A browser opens six connections at most.
MAX_SESSION_CLIENTS = 10
# A client may have this much unread, or one message if that is larger: 700 attempts of up to 0.7 kB.
MAX_QUEUED_BYTES = 256 * 1024
# After this long without a client, the next one starts with the newest attempts.
KEEP_SECONDS = 60.0
MAX_URL_CHARACTERS = 100

Row: TypeAlias = Mapping[str, Any]
Selection: TypeAlias = frozenset[tuple[str, object]]
# A query for attempts: after an id, at most so many, those that are watched, and those that were seen.
Source: TypeAlias = Callable[
    [Connection, int, int, Collection[int], Collection[int]], Awaitable[list[dict[str, Any]]]
]

AWAY = b'event: away\ndata: {"away":true}\n\n'
HEARTBEAT = b":\n\n"


class Outcome(NamedTuple):
    """How an attempt ended, or how far it is: the class of a badge, and its text."""

    kind: str
    text: str


_DELIVERED = Outcome("good", "Delivered")
_FAILED = Outcome("warn", "Failed")
_DEAD = Outcome("bad", "Dead letter")
_SENDING = Outcome("plain", "Being sent")
_WAITING = Outcome("plain", "Waiting")


def outcome(row: Row) -> Outcome:
    """Return how an attempt ended. Pure."""
    match row["status"]:
        case "Completed":
            return _DELIVERED
        case "Failed":
            return _DEAD if row["is_latest"] and row["delivery_status"] == "DeadLettered" else _FAILED
        case "Leased":
            return _SENDING
        case _:
            return _WAITING


def shown(row: Row) -> dict[str, object]:
    """Return what a page shows of an attempt. Pure."""
    kind, text = outcome(row)
    url = row["callback_url"]
    return {
        "id": row["id"],
        "kind": kind,
        "outcome": text,
        "delivery": row["saga_id"],
        "event": row["event_id"],
        "type": row["event_type"],
        "endpoint": row["subscription_id"],
        "url": url if len(url) <= MAX_URL_CHARACTERS else f"{url[:MAX_URL_CHARACTERS]}…",
        "tenant": row["tenant"],
        "attempt": row["attempt"],
        "answer": row["error_code"] or row["response_status"],
        "ms": row["duration_ms"],
        "at": row["finished_at"] or row["created_at"],
    }


def is_final(row: Row) -> bool:
    """Return whether an attempt changes no more."""
    return row["status"] == "Completed" or row["result_applied_at"] is not None


class Item(NamedTuple):
    """An attempt as it was at a tick."""

    tick: int
    row: Row
    text: bytes  # as JSON


class Position(NamedTuple):
    """The place of a client in the ticks of a hub, as the id of an event."""

    hub: str
    tick: int

    @classmethod
    def parsed(cls, text: str) -> "Position | None":
        """Read the id of an event, as a browser sends it back. It may be anything."""
        hub, _, tick = text.partition(".")
        return cls(hub, int(tick)) if tick.isascii() and tick.isdigit() and len(tick) < 16 else None  # noqa: PLR2004

    @property
    def line(self) -> bytes:
        return f"id: {self.hub}.{self.tick}\n".encode()


class Client:
    """A reader of the activity, with the messages that it has not read."""

    def __init__(self, selection: Selection, session_id: str, is_gone: Callable[[], bool]) -> None:
        self.selection = selection
        self.session_id = session_id
        self.is_gone = is_gone
        self.end_reason: str | None = None
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._lost = False
        self._changed = asyncio.Event()

    @property
    def queued_bytes(self) -> int:
        return self._bytes

    def put(self, message: bytes) -> None:
        """Queue a message. If too much is unread, all of that is dropped, and the client gets a gap."""
        if self._messages and self._bytes + len(message) > MAX_QUEUED_BYTES:
            self._messages.clear()
            self._bytes = 0
            self._lost = True
        self._messages.append(message)
        self._bytes += len(message)
        self._changed.set()

    def end(self, reason: str) -> None:
        """Let it end, with what it has not read dropped."""
        self.end_reason = reason
        self._changed.set()

    async def read(self, timeout_seconds: float) -> bytes:
        """Return everything queued, or nothing after the timeout or at the end."""
        if not self._messages and self.end_reason is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._changed.wait()
            except TimeoutError:
                return b""
        found = b"".join([GAP if self._lost else b"", *self._messages])
        self._messages.clear()
        self._bytes, self._lost = 0, False
        return found


GAP = b"event: gap\ndata: {}\n\n"


class ActivityHub:
    """Reads the newest attempts for all clients of this instance."""

    def __init__(self, database: QueryRunner, source: Source) -> None:
        self._database = database
        self._source = source
        self._name = secrets.token_hex(4)  # so that an id of another instance, or of an earlier run, is known
        self._clients: set[Client] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._is_open = True
        self._ticks = 0
        self._is_away = self._is_failing = False
        self._idle_since = time.monotonic()
        self._forget()

    def _forget(self) -> None:
        self._kept: deque[Item] = deque(maxlen=MAX_KEPT)
        self._ticks += 1  # so that no position from before counts as complete
        self._complete_after = self._ticks  # all items of later ticks are kept
        self._newest_id: int | None = None
        # Rows of a transaction that commits late have lower ids than rows that were seen. So a tick looks
        # again at the ids of the one before.
        self._floor_id = 0
        self._seen: set[int] = set()
        self._watched: dict[int, bytes] = {}

    def open(self) -> None:
        """Accept clients, also again."""
        self._is_open = True

    def close(self) -> None:
        """End all clients, and accept no more."""
        self._is_open = False
        for client in self._clients:
            client.end("restart")
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def end_session(self, session_id: str) -> None:
        """End the clients of a session that has logged out."""
        for client in self._clients:
            if client.session_id == session_id:
                client.end("session")

    @asynccontextmanager
    async def client(
        self,
        selection: Selection,
        session_id: str,
        last_event_id: str,
        max_clients: int,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[Client]:
        """Connect a client, which first gets what is kept, or what came after its last event."""
        if not self._is_open or len(self._clients) >= min(max_clients, MAX_CLIENTS):
            raise _too_many("on this instance")
        if sum(client.session_id == session_id for client in self._clients) >= MAX_SESSION_CLIENTS:
            raise _too_many("in this session")
        client = Client(selection, session_id, is_gone)
        if not self._clients and time.monotonic() - self._idle_since > KEEP_SECONDS:
            self._forget()
        client.put(self._first_message(selection, Position.parsed(last_event_id), has_id=bool(last_event_id)))
        self._clients.add(client)
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._run())
        try:
            yield client
        finally:
            self._clients.discard(client)
            if not self._clients and self._ticking is not None:
                self._idle_since = time.monotonic()
                self._ticking.cancel()
                self._ticking = None

    def _first_message(self, selection: Selection, last: Position | None, *, has_id: bool) -> bytes:
        is_ours = (
            last is not None and last.hub == self._name and self._complete_after <= last.tick <= self._ticks
        )
        after = last.tick if last is not None and is_ours else 0
        newest = {
            item.row["id"]: item.text
            for item in self._kept
            if item.tick > after and _has(item.row, selection)
        }
        start = GAP if has_id and not is_ours else b""
        return start + _message(Position(self._name, self._ticks), newest.values(), 0)

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            await self.tick()
            await asyncio.sleep(max(MIN_PAUSE_SECONDS, TICK_SECONDS - (time.monotonic() - started)))

    async def tick(self) -> None:
        """Read once, and send what changed."""
        for client in self._clients:
            if client.is_gone():
                client.end("gone")
        try:
            rows = await self._database.run(
                self._source, self._floor_id, MAX_NEW, tuple(self._watched), tuple(self._seen)
            )
            self._publish(rows)
            self._is_away = self._is_failing = False
        except DatabaseUnavailable:
            if not self._is_away:
                self._is_away = True
                for client in self._clients:
                    client.put(AWAY)
        except Exception:
            if not self._is_failing:
                self._is_failing = True
                log.exception("the live activity cannot be read")

    def _publish(self, rows: list[dict[str, Any]]) -> None:
        """Send what changed."""
        more = self._skipped(rows)
        self._ticks += 1
        items = []
        watched: dict[int, bytes] = {}
        for row in rows:
            text = encoded(shown(row))
            if not is_final(row) and len(watched) < MAX_WATCHED:
                watched[row["id"]] = text
            if text != self._watched.get(row["id"]):
                items.append(Item(self._ticks, row, text))
        items.reverse()
        # Without rows that retention has removed.
        self._watched = watched
        self._keep(items, more)
        if items or more or self._is_away:
            self._send(items, more)

    def _skipped(self, rows: list[dict[str, Any]]) -> int:
        """Return about how many attempts were skipped, and remember which were seen."""
        new_ids = [row["id"] for row in rows if row["id"] not in self._watched]
        before = self._newest_id
        self._newest_id = max(new_ids, default=before or 0)
        if before is None:
            self._floor_id = self._newest_id
        elif len(new_ids) >= MAX_NEW:
            # Without those that are skipped.
            self._floor_id = max(before, min(new_ids) - 1)
        else:
            self._floor_id = before
        more = 0 if before is None else self._floor_id - before
        self._newest_id = max(self._newest_id, before or 0)
        self._seen = {row_id for row_id in (*self._seen, *new_ids) if row_id > self._floor_id}
        return more

    def _keep(self, items: Iterable[Item], more: int) -> None:
        for item in items:
            if len(self._kept) == MAX_KEPT:
                self._complete_after = self._kept[0].tick
            self._kept.append(item)
        if more:
            self._complete_after = self._ticks

    def _send(self, items: list[Item], more: int) -> None:
        """Encode a message for each distinct filter, and queue it for the clients that have it."""
        position = Position(self._name, self._ticks)
        messages: dict[Selection, bytes] = {}
        for client in self._clients:
            message = messages.get(client.selection)
            if message is None:
                texts = [item.text for item in items if _has(item.row, client.selection)]
                message = _message(position, texts, more) if texts or more or self._is_away else b""
                messages[client.selection] = message
            if message:
                client.put(message)


def _too_many(where: str) -> Problem:
    detail = f"too many live pages are open {where}; close one, or try again later"
    return Problem(503, "too_many_live_pages", detail, headers={"Retry-After": "30"})


def _has(row: Row, selection: Selection) -> bool:
    return all(row[name] == value for name, value in selection)


def _message(position: Position, items: Iterable[bytes], more: int) -> bytes:
    return b"".join(_parts(position, items, more))


def _parts(position: Position, items: Iterable[bytes], more: int) -> Iterator[bytes]:
    yield position.line
    yield b'data: {"items":['
    yield b",".join(items)
    yield f'],"more":{more}}}\n\n'.encode()
