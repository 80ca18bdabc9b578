"""Events and dead letters never change; rules for their INSERT, and the routing queue that it fills."""

import io
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.support.catalog import columns, insert, refusal, undone, update
from webhookd.core.states import SagaStatus

if TYPE_CHECKING:
    from tests.support.database import Connection, Database
    from tests.support.flow import Flow

PENDING, IN_PROGRESS, PENDING_RETRY, COMPLETED, DEAD_LETTERED = SagaStatus
EVENTS = "webhookd.events"
LETTERS = "webhookd.dead_letters"
SAGAS = "webhookd.webhook_delivery_sagas"

# Only the migrator, as a member, can become the owner of the tables.
ACTORS = ["superuser", "owner"]

FORBIDDEN: dict[str, dict[str, str]] = {
    EVENTS: {
        "update": "update webhookd.events set payload = '{}'",
        "touch": "update webhookd.events set payload = payload",
        "update of no row": "update webhookd.events set payload = '{}' where false",
        "upsert": """
            insert into webhookd.events (event_type, payload, idempotency_key) values ('a', '{}', 'key')
            on conflict (idempotency_key, tenant) where idempotency_key is not null
            do update set payload = '{}'
            """,
        "merge": """
            merge into webhookd.events e using (select 1) one on true
            when matched then update set payload = '{}'
            """,
        "delete": "delete from webhookd.events",
        "delete of no row": "delete from webhookd.events where false",
        "delete by merge": """
            merge into webhookd.events e using (select 1) one on true when matched then delete
            """,
        "truncate": "truncate webhookd.events cascade",
        # PostgreSQL refuses a TRUNCATE without CASCADE unless it names all referencing tables.
        "truncate with all that refer": """
            truncate webhookd.events, webhookd.webhook_delivery_sagas, webhookd.webhook_delivery_jobs,
                webhookd.dead_letters, webhookd.job_queue, webhookd.job_command_run, webhookd.event_labels
            """,
    },
    LETTERS: {
        "update": "update webhookd.dead_letters set final_error_code = 'OTHER'",
        "touch": "update webhookd.dead_letters set final_error_code = final_error_code",
        "update of no row": "update webhookd.dead_letters set final_error_code = 'OTHER' where false",
        "upsert": """
            insert into webhookd.dead_letters
                (saga_id, event_id, subscription_id, final_error_code, payload_snapshot)
            select saga_id, event_id, subscription_id, final_error_code, payload_snapshot
            from webhookd.dead_letters
            on conflict (saga_id) do update set final_error_code = 'OTHER'
            """,
        "merge": """
            merge into webhookd.dead_letters d using (select 1) one on true
            when matched then update set final_error_code = 'OTHER'
            """,
        "delete": "delete from webhookd.dead_letters",
        "delete of no row": "delete from webhookd.dead_letters where false",
        "delete by merge": """
            merge into webhookd.dead_letters d using (select 1) one on true when matched then delete
            """,
        "truncate": "truncate webhookd.dead_letters cascade",
        "truncate of sagas": "truncate webhookd.webhook_delivery_sagas cascade",
        "truncate of subscriptions": "truncate webhookd.subscriptions cascade",
    },
}

PAYLOAD = '{"amount": 1.10, "id": 7}'
# Equal or nearly equal as JSON, but different bytes.
FORGERIES = {
    "a space less": '{"amount": 1.10,"id": 7}',
    "a space more": '{"amount":  1.10, "id": 7}',
    "a space behind": '{"amount": 1.10, "id": 7} ',
    "a space before": ' {"amount": 1.10, "id": 7}',
    "a newline for a space": '{"amount": 1.10,\n"id": 7}',
    "a digit less": '{"amount": 1.1, "id": 7}',
    "an escape for a letter": '{"amount": 1.10, "i\\u0064": 7}',
    "another order": '{"id": 7, "amount": 1.10}',
    "a key twice": '{"amount": 1.10, "id": 7, "id": 7}',
    "another value": '{"amount": 1.10, "id": 8}',
}

# A dead letter of saga $1 as `bury` creates it.
LETTER = {
    "saga_id": "id",
    "event_id": "event_id",
    "subscription_id": "subscription_id",
    "final_error_code": "coalesce(final_error_code, 'HTTP_500')",
    "payload_snapshot": "(select e.payload from webhookd.events e where e.id = event_id)",
}
REQUEUED = {
    "event_id": "event_id",
    "subscription_id": "subscription_id",
    "dead_letter_id": "id",
    "resent_from": "saga_id",
}


def letter(**changes: str) -> str:
    """Return the INSERT of a dead letter for saga $1; `changes` make it wrong."""
    return insert(LETTERS, LETTER | changes, SAGAS)


def requeued(**changes: str) -> str:
    """Return the INSERT of a new saga for dead letter $1; `changes` make it wrong."""
    return insert(SAGAS, REQUEUED | changes, LETTERS)


async def actor(database: "Database", name: str) -> "Connection":
    """Return a connection that has every right, so that only triggers can refuse."""
    if name == "superuser":
        return await database.connect("superuser")
    connection = await database.connect("migrator")
    await connection.execute("set role webhookd_owner")
    return connection


async def dying(flow: "Flow") -> int:
    """Create a saga of PAYLOAD, DeadLettered in the superuser's open transaction, without its dead letter."""
    await flow.subscribe()
    await flow.publish(payload=PAYLOAD)
    await flow.route()
    await flow.attempt(500)
    saga_id: int = await flow.superuser.fetchval("select max(id) from webhookd.webhook_delivery_sagas")
    await flow.superuser.execute(update(SAGAS, {"status": "'DeadLettered'"}), saga_id)
    return saga_id


async def queued(flow: "Flow") -> set[int]:
    """Return the ids of the events in the routing queue."""
    return {row["event_id"] for row in await flow.superuser.fetch("table webhookd.event_routing_queue")}


# Events and dead letters are append-only


@pytest.mark.parametrize("who", ACTORS)
@pytest.mark.parametrize(
    ("table", "way"), [(table, way) for table, statements in FORBIDDEN.items() for way in statements]
)
async def test_events_and_dead_letters_are_append_only(
    flow: "Flow", database: "Database", table: str, way: str, who: str
) -> None:
    """Any UPDATE, DELETE or TRUNCATE is refused, for owner and superuser, with and without matching rows."""
    await flow.saga_in(DEAD_LETTERED)
    connection = await actor(database, who)
    # The message names the trigger's table: a TRUNCATE of events also reaches dead letters.
    with pytest.raises(asyncpg.PostgresError, match=rf" on {table.split('.')[1]} is not allowed$") as refused:
        await connection.execute(FORBIDDEN[table][way])
    assert refused.value.sqlstate == "WH410"


@pytest.mark.parametrize("who", ACTORS)
async def test_statements_succeed_without_the_triggers(flow: "Flow", database: "Database", who: str) -> None:
    """With the triggers disabled the same statements succeed, so the triggers refuse them."""
    await flow.saga_in(DEAD_LETTERED)
    connection = await actor(database, who)
    async with undone(connection):
        await connection.execute("alter table webhookd.events disable trigger events_immutable")
        await connection.execute("alter table webhookd.dead_letters disable trigger dead_letters_immutable")
        # These allow retention to remove a payload, and nothing else.
        await connection.execute("alter table webhookd.events disable trigger event_payload_removed")
        await connection.execute("alter table webhookd.dead_letters disable trigger snapshot_removed")
        # The referencing tables would refuse to be truncated too.
        await connection.execute("alter table webhookd.job_queue disable trigger job_kept")
        await connection.execute(
            "alter table webhookd.job_command_run disable trigger job_command_run_immutable"
        )
        assert await refusal(connection, FORBIDDEN[EVENTS]["update"]) is None
        assert await refusal(connection, FORBIDDEN[EVENTS]["truncate"]) is None
        assert await refusal(connection, FORBIDDEN[LETTERS]["update"]) is None
        assert await refusal(connection, FORBIDDEN[LETTERS]["truncate"]) is None


@pytest.mark.parametrize("table", [EVENTS, LETTERS])
async def test_no_column_of_an_event_or_dead_letter_changes(flow: "Flow", table: str) -> None:
    """Every column in the catalog is refused, including the identity column."""
    await flow.saga_in(DEAD_LETTERED)
    row_id = await flow.superuser.fetchval(
        "select event_id from webhookd.dead_letters"
        if table == EVENTS
        else "select id from webhookd.dead_letters"
    )
    for column in await columns(flow.superuser, table):
        changed = update(table, {column.name: column.different})
        assert await refusal(flow.superuser, changed, row_id) == "WH410", column.name


# Rules for the INSERT of a dead letter


async def test_correct_dead_letter_is_accepted(flow: "Flow") -> None:
    """With the pair and error of its saga and the payload of the event, it commits with its saga."""
    async with flow.superuser.transaction():
        saga_id = await dying(flow)
        await flow.superuser.execute(letter(), saga_id)
    assert await flow.saga_status(saga_id) is DEAD_LETTERED
    assert await flow.daemon.fetchval("select payload_snapshot::text from webhookd.dead_letters") == PAYLOAD


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
async def test_snapshot_must_equal_the_payload(flow: "Flow", forgery: str) -> None:
    """A snapshot that differs in a byte is refused, even if it is the same JSON."""
    async with undone(flow.superuser):
        saga_id = await dying(flow)
        forged = letter(payload_snapshot="$2::text::json")
        assert await refusal(flow.superuser, forged, saga_id, forgery) == "WH411"
        assert await refusal(flow.superuser, forged, saga_id, PAYLOAD) is None


@pytest.mark.parametrize(
    ("column", "expression"),
    [
        ("event_id", "(select max(id) from webhookd.events)"),
        ("subscription_id", "(select max(id) from webhookd.subscriptions)"),
        ("final_error_code", "'OTHER'"),
    ],
)
async def test_dead_letter_must_match_its_saga(flow: "Flow", column: str, expression: str) -> None:
    """Another event with the same payload, another subscription or another error is refused."""
    async with undone(flow.superuser):
        saga_id = await dying(flow)
        await flow.publish(payload=PAYLOAD)
        await flow.subscribe("other.type")
        assert await refusal(flow.superuser, letter(**{column: expression}), saga_id) == "WH411"
        assert await refusal(flow.superuser, letter(), saga_id) is None


@pytest.mark.parametrize("status", [PENDING, IN_PROGRESS, PENDING_RETRY, COMPLETED])
async def test_dead_letter_needs_a_dead_lettered_saga(flow: "Flow", status: SagaStatus) -> None:
    """In every other status it is refused, even with the right event, subscription, error and payload."""
    saga_id = await flow.saga_in(status)
    assert await refusal(flow.superuser, letter(), saga_id) == "WH411"


async def test_bury_needs_a_dead_lettered_saga(flow: "Flow") -> None:
    """The function obeys the same rule as an INSERT."""
    saga_id = await flow.saga_in(PENDING_RETRY)
    bury = "select webhookd.bury(array[$1::bigint])"
    assert await refusal(flow.superuser, bury, saga_id) == "WH411"
    async with undone(flow.superuser):
        await flow.superuser.execute(update(SAGAS, {"status": "'DeadLettered'"}), saga_id)
        assert await refusal(flow.superuser, bury, saga_id) is None


async def test_saga_has_at_most_one_dead_letter(flow: "Flow") -> None:
    """The unique index refuses a second, identical dead letter."""
    saga_id = await flow.saga_in(DEAD_LETTERED)
    assert await refusal(flow.superuser, letter(), saga_id) == "idx_dead_saga"


async def test_one_wrong_dead_letter_refuses_the_whole_insert(flow: "Flow") -> None:
    """The trigger checks every row of a statement, not only the first."""
    waiting_id = await flow.saga_in(PENDING_RETRY)
    await flow.superuser.execute(
        update(SAGAS, {"next_attempt_at": "next_attempt_at + interval '1 day'"}), waiting_id
    )
    async with undone(flow.superuser):
        saga_id = await dying(flow)
        assert saga_id > waiting_id
        assert (
            await refusal(flow.superuser, f"{letter()} or id = $2 order by id desc", saga_id, waiting_id)
            == "WH411"
        )


# A requeued saga belongs to its dead letter


@pytest.mark.parametrize(
    ("column", "expression"),
    [
        ("event_id", "(select max(id) from webhookd.events)"),
        ("subscription_id", "(select max(id) from webhookd.subscriptions)"),
        ("dead_letter_id", "id + 1000"),
    ],
)
async def test_requeued_saga_must_match_its_dead_letter(flow: "Flow", column: str, expression: str) -> None:
    """The foreign key refuses another event, another subscription and an unknown dead letter."""
    await flow.saga_in(DEAD_LETTERED)
    letter_id = await flow.superuser.fetchval("select id from webhookd.dead_letters")
    await flow.publish("other.type")
    await flow.subscribe("other.type")
    wrong = requeued(**{column: expression})
    assert await refusal(flow.superuser, wrong, letter_id) == "saga_of_dead_letter"
    assert await refusal(flow.superuser, requeued(), letter_id) is None


async def test_dead_letter_is_requeued_once(flow: "Flow") -> None:
    """The unique index refuses a second saga for the same dead letter."""
    await flow.saga_in(DEAD_LETTERED)
    letter_id = await flow.superuser.fetchval("select id from webhookd.dead_letters")
    await flow.superuser.execute(requeued(), letter_id)
    assert await refusal(flow.superuser, requeued(), letter_id) == "uniq_saga_dead_letter"


async def test_event_is_routed_once_per_subscription(flow: "Flow") -> None:
    """The unique index refuses a second saga that is not a requeue, also after a dead letter."""
    saga_id = await flow.saga_in(DEAD_LETTERED)
    again = insert(SAGAS, {"event_id": "event_id", "subscription_id": "subscription_id"}, SAGAS)
    assert await refusal(flow.superuser, again, saga_id) == "uniq_saga_event_subscription"


# Every INSERT of an event fills the routing queue


async def test_inserted_events_are_queued(flow: "Flow", database: "Database") -> None:
    """An application that inserts rows instead of calling publish() gets every row routed."""
    application = await database.connect("application")
    async with application.transaction():
        rows = await application.fetch(
            "insert into webhookd.events (event_type, payload) "
            "select 'order.created', '{}' from generate_series(1, 3) returning id"
        )
        assert await queued(flow) == set()
    assert await queued(flow) == {row["id"] for row in rows}


async def test_rolled_back_insert_is_not_queued(flow: "Flow", database: "Database") -> None:
    """The queue row disappears with its event."""
    application = await database.connect("application")
    async with undone(application):
        await application.execute("insert into webhookd.events (event_type, payload) values ('a', '{}')")
    assert await queued(flow) == set()


@pytest.mark.parametrize(("setting", "expected"), [("origin", {4, 5}), ("replica", set())])
async def test_restored_events_are_not_routed_again(flow: "Flow", setting: str, expected: set[int]) -> None:
    """A COPY with triggers off, as in a restore, leaves the queue empty; an ordinary COPY fills it."""
    dump = io.BytesIO(b"4\torder.created\t{}\n5\torder.created\t{}\n")
    await flow.superuser.execute("select setval('webhookd.events_id_seq', 9)")
    async with flow.superuser.transaction():
        await flow.superuser.execute(f"set local session_replication_role = {setting}")
        copied = await flow.superuser.copy_to_table(
            "events", schema_name="webhookd", source=dump, columns=["id", "event_type", "payload"]
        )
    assert copied == "COPY 2"
    assert await queued(flow) == expected


@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param("id", "1000", id="ahead of the sequence"),
        pytest.param("id", "-7", id="before the first"),
        pytest.param("id", "9223372036854775807", id="the largest"),
        pytest.param("created_at", "now() - interval '1 day'", id="in the past"),
        pytest.param("created_at", "'infinity'", id="never"),
    ],
)
async def test_application_cannot_choose_id_or_time(
    flow: "Flow", database: "Database", column: str, value: str
) -> None:
    """A forged id would make later publishers fail or block routing, so the database assigns both."""
    application = await database.connect("application")
    insert = (
        f"insert into webhookd.events ({column}, event_type, payload) overriding system value "
        f"values ({value}, 'a', '{{}}')"
    )
    with pytest.raises(asyncpg.PostgresError, match="must be those that the database assigns"):
        await application.execute(insert)
    await application.execute("insert into webhookd.events (event_type, payload) values ('a', '{}')")
    assert len(await queued(flow)) == 1
