"""Publishing at the database: transactions of an application, idempotency keys, batches and exact bytes.

The application's login has event_ingest_writer and nothing else.
"""

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, finished, until_blocked, until_finished
from webhookd.db.connection import Connection
from webhookd.deliveries import ingest
from webhookd.deliveries.ingest import NewEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

CALLERS = 20


class Stored(NamedTuple):
    """The rows that publishing left in the database."""

    events: int
    queued: int


async def stored(flow: Flow) -> Stored:
    """Count the events, and the events in the routing queue."""
    return Stored(
        await flow.superuser.fetchval("select count(*) from webhookd.events"),
        await flow.superuser.fetchval("select count(*) from webhookd.event_routing_queue"),
    )


async def publish(
    connection: Connection, payload: str = "{}", key: str | None = None, event_type: str = EVENT_TYPE
) -> int:
    """Publish as an application does: one statement of its own transaction."""
    event_id: int = await connection.fetchval("select webhookd.publish($1, $2, $3)", event_type, payload, key)
    return event_id


async def until_blocked_by(flow: Flow, waiting: Connection, holding: Connection) -> None:
    """Return when one connection waits for the other."""
    await until_blocked(flow.superuser, waiting.get_server_pid(), holding.get_server_pid())


async def outcome(task: "asyncio.Task[int]") -> int:
    """Return the event id of a publishing task, within a time limit."""
    await until_finished(task)
    return await task


def refused(sqlstate: str) -> "pytest.RaisesExc[asyncpg.PostgresError]":
    """Expect an error with this SQLSTATE."""
    return pytest.raises(asyncpg.PostgresError, check=lambda error: error.sqlstate == sqlstate)


class WakeUpListener:
    """Collects the wake-ups of routing."""

    def __init__(self) -> None:
        self._received: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self._received.put_nowait(str(payload))

    async def next(self) -> str:
        """Return the next wake-up; fail if none comes."""
        return await asyncio.wait_for(self._received.get(), CONDITION_TIMEOUT_SECONDS)


@pytest.fixture
async def application(database: Database) -> Connection:
    """Connect as an application."""
    return await database.connect("application")


@pytest.fixture
async def listener(database: Database) -> WakeUpListener:
    """Listen on the channel of the daemon."""
    listener = WakeUpListener()
    connection = await database.connect("daemon")
    await connection.add_listener("webhookd_events", listener)
    return listener


# Transactions of an application


async def test_rollback_leaves_nothing(flow: Flow, application: Connection) -> None:
    """A rolled-back event leaves no row and nothing to route."""
    transaction = application.transaction()
    await transaction.start()
    await publish(application)
    assert await application.fetchval("select count(*) from webhookd.events") == 1
    assert await stored(flow) == Stored(0, 0)
    await transaction.rollback()
    assert await stored(flow) == Stored(0, 0)


async def test_rollback_to_a_savepoint_removes_later_events(flow: Flow, application: Connection) -> None:
    """Events published before the savepoint stay."""
    async with application.transaction():
        kept = await publish(application)
        inner = application.transaction()
        await inner.start()
        await publish(application)
        await inner.rollback()
    assert await stored(flow) == Stored(1, 1)
    assert await flow.superuser.fetchval("select id from webhookd.events") == kept


async def test_committed_event_is_routed(flow: Flow, application: Connection) -> None:
    """An event becomes visible with the commit of the application, not before; then it becomes a saga."""
    subscription_id = await flow.subscribe()
    async with application.transaction():
        event_id = await publish(application)
        assert (await flow.route()).events == 0
    routed = await flow.route()
    assert (routed.events, routed.sagas, routed.subscription_ids) == (1, 1, [subscription_id])
    saga = await flow.superuser.fetchrow(
        "select event_id, subscription_id from webhookd.webhook_delivery_sagas"
    )
    assert saga is not None
    assert tuple(saga) == (event_id, subscription_id)


async def test_inserted_event_is_routed(flow: Flow, application: Connection) -> None:
    """Any statement that inserts an event puts it into the queue in the same commit."""
    await application.execute(
        "insert into webhookd.events (event_type, payload) select $1, '{}' from generate_series(1, 3)",
        EVENT_TYPE,
    )
    assert await stored(flow) == Stored(3, 3)


async def test_commit_sends_a_wake_up(application: Connection, listener: WakeUpListener) -> None:
    """The commit sends a NOTIFY with an empty payload."""
    await publish(application)
    assert await listener.next() == ""


async def test_rollback_sends_no_wake_up(application: Connection, listener: WakeUpListener) -> None:
    """A rolled-back event sends no wake-up, and does not suppress the wake-up of the next event."""
    transaction = application.transaction()
    await transaction.start()
    await publish(application)
    await transaction.rollback()
    await application.execute("notify webhookd_events, 'after the rollback'")
    assert await listener.next() == "after the rollback"
    await publish(application)
    assert await listener.next() == ""


async def test_session_can_suppress_wake_ups(
    flow: Flow, application: Connection, listener: WakeUpListener
) -> None:
    """With webhookd.woken_at at infinity an event is queued without NOTIFY, as two-phase commit needs."""
    await application.execute("set webhookd.woken_at = 'infinity'")
    await publish(application)
    await application.execute("notify webhookd_events, 'after the event'")
    assert await listener.next() == "after the event"
    assert await stored(flow) == Stored(1, 1)


# Idempotency keys


async def test_same_key_and_content_return_the_first_id(flow: Flow, application: Connection) -> None:
    """The same key, type and payload text return the first event and add nothing."""
    first = await publish(application, '{"a": 1}', "key")
    assert await publish(application, '{"a": 1}', "key") == first
    [again] = await ingest.publish(flow.daemon, [NewEvent(EVENT_TYPE, '{"a": 1}', "key", "other")])
    created_at = await flow.superuser.fetchval("select created_at from webhookd.events")
    assert again == ingest.Accepted(first, created_at, duplicate=True)
    assert await stored(flow) == Stored(1, 1)


async def test_events_without_a_key_are_never_duplicates(flow: Flow, application: Connection) -> None:
    """Without a key the same content twice makes two events."""
    assert await publish(application) != await publish(application)
    assert await stored(flow) == Stored(2, 2)


@pytest.mark.parametrize(
    ("event_type", "payload"),
    [(EVENT_TYPE, '{"a":1}'), (EVENT_TYPE, '{"a": 1.0}'), ("order.changed", '{"a": 1}')],
    ids=["other text of equal JSON", "other payload", "other type"],
)
async def test_same_key_with_other_content_is_refused(
    flow: Flow, application: Connection, event_type: str, payload: str
) -> None:
    """Another type or payload text is refused with the key and the id of the first event."""
    first = await publish(application, '{"a": 1}', "it's")
    with refused("WH409") as caught:
        await publish(application, payload, "it's", event_type)
    assert caught.value.message == "idempotency key 'it''s' was used for an event with other content"
    assert caught.value.detail == f"event_id={first}"
    assert await stored(flow) == Stored(1, 1)
    assert await flow.superuser.fetchval("select payload from webhookd.events") == '{"a": 1}'


async def test_keys_differ_by_case_and_trailing_space(application: Connection) -> None:
    """Keys are compared byte by byte."""
    ids = {await publish(application, "{}", key) for key in ("key", "Key", "key ", "k\u0435y")}
    assert len(ids) == 4


async def test_twenty_callers_with_one_key_make_one_event(flow: Flow, database: Database) -> None:
    """Nineteen callers wait for the commit of the first, and all get its id."""
    first, *others = [await database.connect("application") for _ in range(CALLERS)]
    async with first.transaction():
        event_id = await publish(first, key="key")
        tasks = [asyncio.create_task(publish(other, key="key")) for other in others]
        for other in others:
            await until_blocked_by(flow, other, first)
    assert [await outcome(task) for task in tasks] == [event_id] * (CALLERS - 1)
    assert await stored(flow) == Stored(1, 1)


async def test_twenty_callers_at_once_make_one_event(flow: Flow, database: Database) -> None:
    """When no caller is held back, all callers get the same id."""
    callers = [await database.connect("application") for _ in range(CALLERS)]
    ids = await asyncio.gather(*(publish(caller, key="key") for caller in callers))
    assert len(set(ids)) == 1
    assert await stored(flow) == Stored(1, 1)


async def test_twenty_callers_after_a_rollback_make_one_event(flow: Flow, database: Database) -> None:
    """When the first caller rolls back, one waiting caller creates the event, and all others get its id."""
    first, *others = [await database.connect("application") for _ in range(CALLERS)]
    transaction = first.transaction()
    await transaction.start()
    lost = await publish(first, key="key")
    tasks = [asyncio.create_task(publish(other, key="key")) for other in others]
    for other in others:
        await until_blocked_by(flow, other, first)
    await transaction.rollback()
    [event_id] = {await outcome(task) for task in tasks}
    assert event_id != lost
    assert await stored(flow) == Stored(1, 1)


async def test_second_caller_waits_for_an_open_transaction(
    flow: Flow, database: Database, application: Connection
) -> None:
    """After the commit the second caller gets the id of the first event."""
    second = await database.connect("application")
    async with application.transaction():
        first_id = await publish(application, key="key")
        waiting = asyncio.create_task(publish(second, key="key"))
        await until_blocked_by(flow, second, application)
        assert not await finished(waiting)
    assert await outcome(waiting) == first_id
    assert await stored(flow) == Stored(1, 1)


async def test_rollback_frees_the_key(flow: Flow, database: Database, application: Connection) -> None:
    """The second caller waits, and after the rollback creates its own event."""
    second = await database.connect("application")
    transaction = application.transaction()
    await transaction.start()
    first_id = await publish(application, '"first"', "key")
    waiting = asyncio.create_task(publish(second, '"second"', "key"))
    await until_blocked_by(flow, second, application)
    await transaction.rollback()
    second_id = await outcome(waiting)
    assert second_id != first_id
    row = await flow.superuser.fetchrow("select id, payload from webhookd.events")
    assert row is not None
    assert tuple(row) == (second_id, '"second"')


async def test_conflict_is_found_after_the_wait(
    flow: Flow, database: Database, application: Connection
) -> None:
    """A conflict that did not exist when the second caller began is found when the first commits."""
    second = await database.connect("application")
    async with application.transaction():
        await publish(application, '"first"', "key")
        waiting = asyncio.create_task(publish(second, '"second"', "key"))
        await until_blocked_by(flow, second, application)
    with refused("WH409"):
        await outcome(waiting)
    assert await stored(flow) == Stored(1, 1)


async def test_wait_for_a_key_ends_at_the_lock_timeout(
    flow: Flow, database: Database, application: Connection
) -> None:
    """A caller that sets lock_timeout gets 55P03 while the first transaction is open."""
    second = await database.connect("application")
    await second.execute("set lock_timeout = '1ms'")
    async with application.transaction():
        first_id = await publish(application, key="key")
        with refused("55P03"):
            await publish(second, key="key")
    assert await publish(second, key="key") == first_id
    assert await stored(flow) == Stored(1, 1)


async def test_old_snapshot_gets_a_serialization_failure(
    flow: Flow, database: Database, application: Connection
) -> None:
    """In REPEATABLE READ a key newer than the snapshot is a serialization failure, not a wrong answer."""
    second = await database.connect("application")
    transaction = second.transaction(isolation="repeatable_read")
    await transaction.start()
    await second.fetchval("select count(*) from webhookd.events")
    await publish(application, key="key")
    with refused("40001"):
        await publish(second, key="key")
    await transaction.rollback()
    assert await stored(flow) == Stored(1, 1)


# Batches


async def test_batch_answers_in_the_order_of_its_events(flow: Flow) -> None:
    """Every answer has the position of its event, for any order of the keys."""
    keys = ["m", None, "z", "a", None, "M"]
    batch = [NewEvent(EVENT_TYPE, f"{place}", key) for place, key in enumerate(keys)]
    accepted = await ingest.publish(flow.daemon, batch)
    assert [answer.duplicate for answer in accepted] == [False] * len(keys)
    rows = await flow.superuser.fetch("select id, payload from webhookd.events")
    payloads = {row["id"]: row["payload"] for row in rows}
    assert [payloads[answer.id] for answer in accepted] == [event.payload for event in batch]
    assert await stored(flow) == Stored(6, 6)


async def test_batch_mixes_new_known_and_keyless_events(flow: Flow) -> None:
    """Known keys return their first ids; all other events are new."""
    [known] = await ingest.publish(flow.daemon, [NewEvent(EVENT_TYPE, "1", "known")])
    batch = [
        NewEvent(EVENT_TYPE, "2", "new"),
        NewEvent(EVENT_TYPE, "1", "known"),
        NewEvent(EVENT_TYPE, "3"),
        NewEvent(EVENT_TYPE, "3"),
    ]
    new, again, *keyless = await ingest.publish(flow.daemon, batch)
    assert again == known._replace(duplicate=True)
    assert not any(answer.duplicate for answer in (new, *keyless))
    assert len({answer.id for answer in (known, new, *keyless)}) == 4
    assert await stored(flow) == Stored(4, 4)


async def test_key_twice_in_a_batch_is_a_duplicate(flow: Flow) -> None:
    """The first of equal events is stored, and the others return its id."""
    batch = [NewEvent(EVENT_TYPE, "1", "key"), NewEvent(EVENT_TYPE, "2"), NewEvent(EVENT_TYPE, "1", "key")]
    first, between, last = await ingest.publish(flow.daemon, batch)
    assert (first.duplicate, between.duplicate, last.duplicate) == (False, False, True)
    assert last.id == first.id != between.id
    assert await stored(flow) == Stored(2, 2)


@pytest.mark.parametrize("conflicting", ["inside", "before"])
async def test_conflict_refuses_the_whole_batch(flow: Flow, conflicting: str) -> None:
    """Other content for a key, used in the batch or before it, stores no event of the batch."""
    if conflicting == "before":
        await ingest.publish(flow.daemon, [NewEvent(EVENT_TYPE, '"other"', "key")])
    before = await stored(flow)
    batch = [NewEvent(EVENT_TYPE, "1"), NewEvent(EVENT_TYPE, "2", "key"), NewEvent(EVENT_TYPE, "4", "good")]
    if conflicting == "inside":
        batch.append(NewEvent(EVENT_TYPE, "3", "key"))
    with refused("WH409"):
        await ingest.publish(flow.daemon, batch)
    assert await stored(flow) == before


async def test_one_bad_event_refuses_the_whole_batch(flow: Flow) -> None:
    """An event that cannot be stored refuses the whole batch."""
    with refused("WH400"):
        await ingest.publish(flow.daemon, [NewEvent(EVENT_TYPE, "1"), NewEvent("bad type", "2")])
    assert await stored(flow) == Stored(0, 0)


async def test_batches_with_keys_in_opposite_order_do_not_deadlock(flow: Flow, database: Database) -> None:
    """Two batches that both started and wait at a middle key end one after the other."""

    async def publish_keys(connection: Connection, keys: "Sequence[str]") -> list[ingest.Accepted]:
        return await ingest.publish(connection, [NewEvent(EVENT_TYPE, "{}", key) for key in keys])

    holder, forward, backward = [await database.connect("daemon") for _ in range(3)]
    transaction = holder.transaction()
    await transaction.start()
    await publish_keys(holder, "m")
    tasks = []
    for connection, keys in ((forward, "amz"), (backward, "zma")):
        tasks.append(asyncio.create_task(publish_keys(connection, keys)))
        await until_blocked(flow.superuser, connection.get_server_pid())
    await transaction.rollback()
    for task in tasks:
        await until_finished(task)
    one, other = [await task for task in tasks]
    assert [answer.id for answer in one] == [answer.id for answer in reversed(other)]
    assert [answer.duplicate for answer in (*one, *other)] == [False] * 3 + [True] * 3
    assert await stored(flow) == Stored(3, 3)


# Bytes


PAYLOADS = {
    "spaces and key order": '{"b": 1,  "a" : 2}',
    "outer whitespace": "\n\t{ }\r\n ",
    "duplicate keys": '{"a": 1, "a": 2}',
    "number forms": '{"amount": 1.10, "big": 1e2, "bigger": 123456789012345678901234567890}',
    "escapes": r'{"escapes": "\u00e9\/\n\"\\", "pair": "\ud83d\ude00", "lone": "\ud800"}',
    "escaped NUL": r'{"nul": "\u0000"}',
    "non-ASCII": '{"text": "é☃😀\u2028\u007f\u202e"}',
    "string": '"a string"',
    "number": "-0.0",
    "boolean": "true",
    "null": "null",
    "array": "[]",
    "1 MiB": '"' + "x" * (1024 * 1024 - 2) + '"',
}


async def test_payloads_are_kept_byte_for_byte(flow: Flow, application: Connection) -> None:
    """A worker loads exactly the published text, and the same text counts as the same content."""
    await flow.subscribe()
    names = {}
    for name, payload in PAYLOADS.items():
        event_id = await publish(application, payload, name)
        names[event_id] = name
        assert await publish(application, payload, name) == event_id
    await flow.route()
    await flow.start()
    leases = await flow.claim()
    rows = await flow.daemon.fetch(
        "select job_id, payload, convert_to(payload, 'UTF8') as bytes from webhookd.load_payloads($1, $2)",
        [lease.job_id for lease in leases],
        [lease.lease_token for lease in leases],
    )
    name_of_job = {lease.job_id: names[lease.event_id] for lease in leases}
    loaded = {name_of_job[row["job_id"]]: row for row in rows}
    # Compares names, not texts: a difference in a megabyte makes an unreadable message.
    assert [name for name in PAYLOADS if loaded[name]["payload"] != PAYLOADS[name]] == []
    assert [name for name in PAYLOADS if loaded[name]["bytes"] != PAYLOADS[name].encode()] == []


async def test_type_and_correlation_id_are_stored(flow: Flow, application: Connection) -> None:
    """publish() and publish_many() store all four arguments in the row of the event."""
    given = ("order.created_2", "{}", "a key, with a comma", "trace 00-af/7")
    await application.fetchval("select webhookd.publish($1, $2, $3, $4)", *given)
    await ingest.publish(flow.daemon, [NewEvent("a.b", "[]", None, "~"), NewEvent("A", "0")])
    rows = await flow.superuser.fetch(
        "select event_type, payload, idempotency_key, correlation_id from webhookd.events order by id"
    )
    assert [tuple(row) for row in rows] == [given, ("a.b", "[]", None, "~"), ("A", "0", None, None)]


async def test_event_has_the_time_of_its_transaction(flow: Flow, application: Connection) -> None:
    """created_at is the transaction time of the database, in the row and in the answer."""
    async with application.transaction():
        now = await application.fetchval("select now()")
        await publish(application)
    assert await flow.superuser.fetchval("select created_at from webhookd.events") == now
    [accepted] = await ingest.publish(flow.daemon, [NewEvent(EVENT_TYPE, "{}")])
    assert accepted.created_at == await flow.superuser.fetchval(
        "select created_at from webhookd.events where id = $1", accepted.id
    )


@pytest.mark.parametrize("style", ["SQL, DMY", "German", "Postgres, MDY"])
async def test_wake_up_mark_survives_any_datestyle(flow: Flow, database: Database, style: str) -> None:
    """The mark of the last wake-up is readable with any DateStyle and time zone of the session."""
    application = await database.connect("application")
    publish = "select webhookd.publish('order.created', '{}')"
    await application.execute("set timezone = 'Asia/Jakarta'")
    await application.execute(f"set datestyle = '{style}'")
    await application.execute(publish)
    await application.execute(publish)
    await application.execute("set datestyle = 'ISO, MDY'")
    await application.execute(publish)
    assert (await flow.route()).events == 3
