"""The hub of the live page: what each client gets, and that nothing grows without a bound."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.support.waiting import until_true
from webhookd.console import activity
from webhookd.console.activity import ActivityHub, Client, Position, Selection, shown
from webhookd.core.errors import DatabaseUnavailable
from webhookd.http.responses import Problem

if TYPE_CHECKING:
    from webhookd.http.routes import QueryRunner

ALL: Selection = frozenset()


def attempt(row_id: int, status: str = "Completed", **changes: Any) -> dict[str, Any]:
    """Return a row as the query returns it."""
    row = {
        "id": row_id,
        "saga_id": row_id * 10,
        "event_id": 1,
        "subscription_id": 7,
        "event_type": "order.paid",
        "tenant": "acme",
        "callback_url": "https://receiver.example/hook",
        "attempt": 1,
        "status": status,
        "created_at": "2026-01-01T00:00:00Z",
        "finished_at": None,
        "response_status": 200,
        "error_code": None,
        "duration_ms": 5,
        "delivery_status": "Completed",
        "is_latest": True,
        "result_applied_at": "2026-01-01T00:00:01Z" if status in ("Completed", "Failed") else None,
    }
    return row | changes


class Attempts:
    """A table of attempts in place of the database, which counts the queries."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.queries = 0
        self.is_away = False

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows |= {row["id"]: row for row in rows}

    async def run(self, _: object, *inputs: Any) -> list[dict[str, Any]]:
        """Stand in for QueryRunner.run."""
        return await self.newest(*inputs)

    async def newest(
        self, after_id: int, limit: int, watched: Collection[int], seen: Collection[int]
    ) -> list[dict[str, Any]]:
        self.queries += 1
        if self.is_away:
            raise DatabaseUnavailable("away")
        later = [row_id for row_id in self.rows if row_id > after_id and row_id not in seen]
        ids = {*sorted(later, reverse=True)[:limit], *watched}
        return [self.rows[row_id] for row_id in sorted(ids, reverse=True) if row_id in self.rows]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Give an empty table, and leave all ticks but the first to the test."""
    monkeypatch.setattr(activity, "TICK_SECONDS", 3600.0)
    return Attempts()


@pytest.fixture
async def hub(attempts: Attempts) -> AsyncIterator[ActivityHub]:
    """Give a hub that reads the table."""
    hub = ActivityHub(cast("QueryRunner", attempts), cast("Any", None))
    yield hub
    hub.close()


def connect(hub: ActivityHub, selection: Selection = ALL, last_id: str = "", session: str = "one") -> Any:
    """Connect a client of this session."""
    return hub.client(selection, session, last_id, activity.MAX_CLIENTS)


def messages(data: bytes) -> list[tuple[str, Any]]:
    """Return the name and the content of each event."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", "message"), json.loads(fields["data"])))
    return found


async def ids_of(client: Client) -> list[int]:
    """Return the ids of the attempts that are queued."""
    found = messages(await client.read(0))
    return [item["id"] for name, content in found if name == "message" for item in content["items"]]


async def test_attempts_are_sent_in_order_and_again_when_they_change(
    hub: ActivityHub, attempts: Attempts
) -> None:
    """The oldest first; one that was being sent is sent again with its result, and then no more."""
    attempts.add(attempt(1), attempt(2, "Leased"), attempt(3, "Pending"))
    async with connect(hub) as client:
        await hub.tick()
        assert await ids_of(client) == [1, 2, 3]
        await hub.tick()
        assert await client.read(0) == b""
        failed = {"delivery_status": "InProgress", "result_applied_at": None, "error_code": "HTTP_500"}
        attempts.add(attempt(2, "Failed", **failed))
        await hub.tick()
        assert await ids_of(client) == [2]
        attempts.add(attempt(2, "Failed", delivery_status="DeadLettered", error_code="HTTP_500"))
        await hub.tick()
        [(_, content)] = messages(await client.read(0))
        [item] = content["items"]
        assert (item["outcome"], item["kind"], item["answer"]) == ("Dead letter", "bad", "HTTP_500")
        attempts.add(attempt(2, "Completed"))
        await hub.tick()
        assert await client.read(0) == b"", "a final attempt is not watched"


async def test_attempt_that_was_committed_late_is_sent(hub: ActivityHub, attempts: Attempts) -> None:
    """Its id is lower than one that was seen at the tick before."""
    attempts.add(attempt(1))
    async with connect(hub) as client:
        await hub.tick()
        assert await ids_of(client) == [1]
        attempts.add(attempt(5))
        await hub.tick()
        assert await ids_of(client) == [5]
        attempts.add(attempt(4))
        await hub.tick()
        assert await ids_of(client) == [4]
        await hub.tick()
        assert await ids_of(client) == []


async def test_filters(hub: ActivityHub, attempts: Attempts) -> None:
    """Each client gets what its filter selects, and a message is encoded once for equal filters."""
    acme: Selection = frozenset({("tenant", "acme")})
    async with (
        connect(hub) as everything,
        connect(hub, acme) as one,
        connect(hub, frozenset({("tenant", "acme")})) as other,
        connect(hub, frozenset({("tenant", "globex"), ("status", "Failed")})) as failed,
    ):
        for client in (everything, one, other, failed):
            await client.read(0)
        attempts.add(attempt(1), attempt(2, "Failed", tenant="globex"), attempt(3, tenant="globex"))
        await hub.tick()
        assert one._messages[0] is other._messages[0]
        assert await ids_of(everything) == [1, 2, 3]
        assert await ids_of(one) == [1]
        assert await ids_of(failed) == [2]


async def test_too_many_attempts_are_skipped_and_counted(hub: ActivityHub, attempts: Attempts) -> None:
    """Only the newest of a tick are sent, with the number of those in between."""
    attempts.add(attempt(1))
    async with connect(hub) as client:
        await hub.tick()
        await client.read(0)
        attempts.add(*(attempt(row_id) for row_id in range(2, 1002)))
        await hub.tick()
        [(_, content)] = messages(await client.read(0))
        assert [item["id"] for item in content["items"]] == list(range(802, 1002))
        assert content["more"] == 800


async def test_client_that_does_not_read_uses_bounded_memory(hub: ActivityHub, attempts: Attempts) -> None:
    """Thousands of attempts later its queue is within the bound. It is told that messages were dropped."""
    url = "https://receiver.example/" + "x" * 475
    async with connect(hub) as slow, connect(hub) as quick:
        most, got, lowest = 0, 0, 1
        for _ in range(30):
            attempts.add(*(attempt(n, callback_url=url) for n in range(lowest, lowest + 150)))
            lowest += 150
            await hub.tick()
            most = max(most, slow.queued_bytes)
            got += len(await ids_of(quick))
        assert got == lowest - 1
        assert most <= activity.MAX_QUEUED_BYTES
        found = messages(await slow.read(0))
        assert found[0][0] == "gap"
        assert found[-1][1]["items"][-1]["id"] == lowest - 1
        assert sum(len(content.get("items", [])) for _, content in found) < lowest - 1
        assert slow.queued_bytes == 0
    assert len(hub._kept) == activity.MAX_KEPT
    assert len(hub._seen) < 2 * activity.MAX_NEW


async def test_watched_attempts_are_bounded(hub: ActivityHub, attempts: Attempts) -> None:
    """Of many attempts that never finish, only the newest are read again."""
    async with connect(hub):
        for start in range(1, 2001, 100):
            attempts.add(*(attempt(row_id, "Pending") for row_id in range(start, start + 100)))
            await hub.tick()
        assert len(hub._watched) == activity.MAX_WATCHED
        assert max(hub._watched) == 2000


async def test_client_continues_after_its_last_event(hub: ActivityHub, attempts: Attempts) -> None:
    """It gets what came since then. With an id of another instance, or an old one, it also gets a gap."""
    attempts.add(attempt(1), attempt(2))
    async with connect(hub) as client:
        await hub.tick()
        data = (await client.read(0)).decode()
        last_id = data.rpartition("id: ")[2].partition("\n")[0]
        attempts.add(attempt(3))
        await hub.tick()
    async with connect(hub, last_id=last_id) as client:
        assert messages(await client.read(0))[0][0] == "message"
    async with connect(hub, last_id=last_id) as client:
        assert await ids_of(client) == [3]
    for foreign in ("0000.1", f"{last_id}9", "x", ".", "a.b.c", "é.²", "-1.-1", "x" * 5000):
        async with connect(hub, last_id=foreign) as client:
            found = messages(await client.read(0))
            assert [name for name, _ in found] == ["gap", "message"], foreign
            assert [item["id"] for item in found[1][1]["items"]] == [1, 2, 3]
    async with connect(hub) as client:
        for start in range(10, 1200, 100):
            attempts.add(*(attempt(row_id) for row_id in range(start, start + 100)))
            await hub.tick()
    async with connect(hub, last_id=last_id) as client:
        assert messages(await client.read(0))[0][0] == "gap"


async def test_database_is_asked_only_while_a_client_is_connected(
    hub: ActivityHub, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first client and after the last one there is no query."""
    await asyncio.sleep(0.05)
    assert attempts.queries == 0
    monkeypatch.setattr(activity, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(activity, "MIN_PAUSE_SECONDS", 0.001)
    async with connect(hub), connect(hub):
        await until_true(lambda: attempts.queries > 3)
    before = attempts.queries
    await asyncio.sleep(0.1)
    assert attempts.queries == before


async def test_number_of_clients_is_bounded(hub: ActivityHub) -> None:
    """The next one gets 503, until another has left."""
    async with connect(hub):
        with pytest.raises(Problem) as refused:
            async with hub.client(ALL, "two", "", 1):
                pass
        assert (refused.value.status, refused.value.code) == (503, "too_many_live_pages")
        assert "Retry-After" in refused.value.headers
    async with hub.client(ALL, "two", "", 1):
        pass


async def test_session_cannot_take_the_places_of_others(hub: ActivityHub) -> None:
    """A session may have a bounded number of clients; another session still gets one."""
    async with AsyncExitStack() as stack:
        for _ in range(activity.MAX_SESSION_CLIENTS):
            await stack.enter_async_context(connect(hub, session="one"))
        with pytest.raises(Problem) as refused:
            await stack.enter_async_context(connect(hub, session="one"))
        assert refused.value.code == "too_many_live_pages"
        await stack.enter_async_context(connect(hub, session="two"))


async def test_clients_end(hub: ActivityHub) -> None:
    """With their session, with their connection, and all of them at shutdown; then none is accepted."""
    is_gone = False
    async with (
        connect(hub, session="one") as one,
        connect(hub, session="two") as two,
        hub.client(ALL, "three", "", 9, is_gone=lambda: is_gone) as three,
    ):
        hub.end_session("one")
        assert (one.end_reason, two.end_reason, three.end_reason) == ("session", None, None)
        is_gone = True
        await hub.tick()
        assert (two.end_reason, three.end_reason) == (None, "gone")
        await two.read(0)
        waiting = asyncio.create_task(two.read(60))
        await asyncio.sleep(0)
        hub.close()
        await asyncio.wait_for(waiting, 5)
        assert two.end_reason == "restart"
    with pytest.raises(Problem):
        async with connect(hub):
            pass
    hub.open()
    async with connect(hub):
        pass


async def test_clients_learn_that_the_database_is_away(hub: ActivityHub, attempts: Attempts) -> None:
    """Once; and the next message says that it is back, also if there is nothing new."""
    async with connect(hub) as client:
        await hub.tick()
        await client.read(0)
        attempts.is_away = True
        await hub.tick()
        assert [name for name, _ in messages(await client.read(0))] == ["away"]
        attempts.is_away = False
        await hub.tick()
        assert messages(await client.read(0)) == [("message", {"items": [], "more": 0})]


def test_long_url_is_cut() -> None:
    """A message has a bound, because each of its items has one."""
    url = "https://receiver.example/" + "x" * 475
    assert len(str(shown(attempt(1, callback_url=url))["url"])) == activity.MAX_URL_CHARACTERS + 1


def test_position_is_parsed_strictly() -> None:
    """A browser may send any text."""
    assert Position.parsed("ab12.7") == Position("ab12", 7)
    for text in ("", "7", "ab12", "ab12.", "ab12.-1", "ab12.²", "ab12." + "9" * 20):
        assert Position.parsed(text) is None


async def test_client_that_returns_after_a_long_pause_is_told_of_the_gap(
    hub: ActivityHub, attempts: Attempts
) -> None:
    """Without clients nothing is read, so what happened in the meantime is not known."""
    attempts.add(attempt(1))
    async with connect(hub) as client:
        await hub.tick()
        last = Position(hub._name, hub._ticks)
        assert await ids_of(client)
    hub._idle_since -= activity.KEEP_SECONDS + 1
    async with connect(hub, last_id=f"{last.hub}.{last.tick}") as client:
        assert "gap" in [name for name, _ in messages(await client.read(0))]
