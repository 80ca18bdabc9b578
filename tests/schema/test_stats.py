"""Statistics equal a count of the jobs and dead letters, whoever applied the results; reads are cheap."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from tests.support.flow import POLICY, Flow
from tests.support.history import watch
from tests.support.invariants import AUDIT, broken_rows
from tests.support.races import Contest
from tests.support.sweeps import HOLDER, erase, let_pass
from webhookd.core.settings import RetentionSettings
from webhookd.deliveries import attempts, sagas, stats
from webhookd.retention import queries

if TYPE_CHECKING:
    from tests.support.database import Connection, Database

DEAD = POLICY._replace(max_attempts=2, base_delay_seconds=0)
SESSIONS = 3
# Levels of the index, and the planner's lookup of its ends.
ALLOWANCE_BLOCKS = 20
DURATIONS_MS = (None, 0, 10, 11, 25, 30_000, 30_001, 2**31 - 1)
# A month of 50 subscriptions by hour, and three hours by minute, of two sessions.
MONTH = """
    set session_replication_role = replica;
    insert into webhookd.subscriptions (event_type, event_types, callback_url)
    select 'a', '{a}', 'https://receiver.example/' from generate_series(1, 50);
    insert into webhookd.delivery_stats_hours (subscription_id, hour, delivered)
    select s, date_bin('1 hour', now(), '2000-01-01 00:00:00+00') - h * interval '1 hour', 1
    from generate_series(0, 50) s, generate_series(5, 743) h;
    insert into webhookd.delivery_stats (subscription_id, minute, writer, delivered)
    select s, date_bin('1 minute', now(), '2000-01-01 00:00:00+00') - m * interval '1 minute', w, 1
    from generate_series(0, 50) s, generate_series(0, 179) m, generate_series(1, 2) w;
    set session_replication_role = origin
"""


async def differences(superuser: "Connection") -> dict[str, Any]:
    """Return the rows where the statistics are not those of the jobs and dead letters."""
    return await broken_rows(superuser, ("stats", "retention: a removed subscription"))


async def totals(connection: "Connection", **chosen: Any) -> dict[str, Any]:
    """Return the totals of the last hour."""
    arguments: dict[str, Any] = {"subscription_id": None, "tenant": None, "since": None, "until": None}
    found = await stats.stats(connection, **arguments | chosen, step_seconds=None)
    return dict(found["totals"])


async def test_one_attempt_of_each_kind(flow: Flow) -> None:
    """A success in one call, one in two steps, a failure, an expired lease and two dead letters."""
    await flow.superuser.execute(AUDIT)
    subscription_id = await flow.subscribe()
    for _ in range(5):
        await flow.publish()
    await flow.route()
    await flow.start()
    leases = sorted(await flow.claim())
    await sagas.complete(flow.daemon, [_report(leases[0], 200, 7)])
    await attempts.report(flow.daemon, [_report(leases[1], 204, 40), _report(leases[2], 500, 3000)])
    await attempts.report(flow.daemon, [_report(leases[3], 500, None)])
    await flow.expire_lease(leases[4].job_id)
    await attempts.reset_expired(flow.daemon, 10, 0)
    await flow.apply(DEAD, batch_size=4)
    await flow.apply(DEAD._replace(max_attempts=1))
    # The two failures wait for a retry, and the limit is lowered.
    await sagas.dead_letter_exhausted(flow.daemon, 0, 10, 1)
    assert await differences(flow.superuser) == {}
    expected = {"delivered": 2, "failed": 3, "completed": 2, "dead_lettered": 3}
    for chosen in ({}, {"subscription_id": subscription_id}):
        found = await totals(flow.daemon, **chosen)
        assert {name: found[name] for name in expected} == expected
        assert found["success_rate"] == 0.4
    rows = await flow.superuser.fetch(
        "select durations from webhookd.delivery_stats where subscription_id = 0"
    )
    assert [sum(column) for column in zip(*(row["durations"] for row in rows), strict=True)] == [
        1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0,
    ]  # fmt: skip


def _report(lease: attempts.Lease, status: int, duration_ms: int | None) -> attempts.Report:
    error = None if status < 300 else f"HTTP_{status}"
    return attempts.Report(lease.job_id, lease.lease_token, status, error_code=error, duration_ms=duration_ms)


@pytest.mark.each_version
async def test_parallel_sessions_count_everything_once(flow: Flow, database: "Database") -> None:
    """Sessions apply results of the same subscriptions at the same time, with rollbacks in between."""
    await flow.superuser.execute(AUDIT)
    for number in range(4):
        await flow.subscribe(f"n{number}.created")
    chance = random.Random(19)  # noqa: S311
    for _ in range(160):
        await flow.publish(f"n{chance.randrange(4)}.created")
    await flow.route()
    sides = [await Flow.open(database) for _ in range(SESSIONS)]
    # A failing endpoint gets one attempt at a time.
    while await sagas.due_subscriptions(flow.daemon, 0, 10):
        await flow.start(max_attempts=DEAD.max_attempts)
        leases = await flow.claim()
        chance.shuffle(leases)
        parts = [leases[place::SESSIONS] for place in range(SESSIONS)]
        seeds = [chance.random() for _ in sides]
        await asyncio.gather(*map(_work, sides, parts, seeds))
        await flow.apply(DEAD)  # what small batches left
    assert await differences(flow.superuser) == {}
    found = await totals(flow.daemon)
    assert found["completed"] + found["dead_lettered"] == 160


async def _work(side: Flow, leases: list[attempts.Lease], seed: float) -> None:
    """Apply results in batches of different sizes; some transactions are rolled back first."""
    chance = random.Random(seed)  # noqa: S311
    while leases:
        size = chance.choice([1, 1, 2, 7])
        batch, leases = leases[:size], leases[size:]
        reports = [
            _report(lease, chance.choice([200, 200, 500]), chance.choice(DURATIONS_MS)) for lease in batch
        ]
        good = [it for it in reports if it.is_success]
        if good and chance.random() < 0.3:
            transaction = side.daemon.transaction()
            await transaction.start()
            await sagas.complete(side.daemon, good)
            await transaction.rollback()
        in_one_call = good if chance.random() < 0.7 else []
        if in_one_call:
            await sagas.complete(side.daemon, in_one_call)
        if rest := [it for it in reports if it not in in_one_call]:
            await attempts.report(side.daemon, rest)
        await side.apply(DEAD, batch_size=chance.choice([1, 50]))


async def test_sessions_never_wait_for_each_other(database: "Database") -> None:
    """Two sessions apply results of one subscription; the first is still open when the second ends."""
    race = Contest(await Flow.open(database), await Flow.open(database))
    await race.first.subscribe()
    for _ in range(4):
        await race.first.publish()
    await race.first.route()
    await race.first.start()
    leases = await race.first.claim()
    async with race.first.daemon.transaction():
        await sagas.complete(race.first.daemon, [_report(leases[0], 200, 1)])
        await race.skips(sagas.complete(race.second.daemon, [_report(leases[1], 200, 1)]))
        await attempts.report(race.second.daemon, [_report(leases[2], 500, 1)])
        await race.skips(race.second.apply())
    assert await race.count("select sum(delivered) from webhookd.delivery_stats") == 4


async def test_minutes_become_hours(flow: Flow) -> None:
    """Nothing is lost or counted twice: batches, a rollback, and a late row of an hour that was added up."""
    await flow.superuser.execute(AUDIT)
    await _let_minutes_pass(flow, hours=5, number=7)
    keep = RetentionSettings(stats_days=0)
    transaction = flow.daemon.transaction()
    await transaction.start()
    assert (await queries.sweep_stats(flow.daemon, HOLDER, 100, keep)).examined == 14
    await transaction.rollback()
    examined = 0
    while (batch := await queries.sweep_stats(flow.daemon, HOLDER, 3, keep)).more:
        examined += batch.examined
    assert examined + batch.examined == 14
    assert await _sums(flow) == {"delivery_stats": None, "delivery_stats_hours": 14}
    await _let_minutes_pass(flow, hours=5, number=1)
    await queries.sweep_stats(flow.daemon, HOLDER, 3, keep)
    assert await _sums(flow) == {"delivery_stats": None, "delivery_stats_hours": 16}
    rows = await flow.superuser.fetch("select durations from webhookd.delivery_stats_hours")
    assert sum(row["durations"][0] for row in rows) == 16
    since = datetime.now(UTC) - timedelta(days=1)
    assert (await totals(flow.daemon, since=since))["delivered"] == 8


async def test_recent_minutes_stay(flow: Flow) -> None:
    """The API shows three hours by minute, so as much is kept."""
    await _let_minutes_pass(flow, hours=3, number=3)
    batch = await queries.sweep_stats(flow.daemon, HOLDER, 100, RetentionSettings())
    assert (batch.examined, batch.removed, batch.more) == (0, {"stats": 0}, False)


async def test_expired_hours_are_removed(flow: Flow) -> None:
    """After the period and not before; never with 0; and only by the holder of the turn."""
    await flow.superuser.execute(MONTH)
    settings = RetentionSettings(stats_days=20)
    expired = await queries.expired_stats(flow.daemon, settings)
    assert expired == await flow.superuser.fetchval(
        """
        select count(*) from webhookd.delivery_stats_hours h
        where date_trunc('day', h.hour, 'UTC') + interval '1 day' <= now() - interval '20 days'
        """
    )
    assert 51 * 9 * 24 < expired < 51 * 12 * 24
    assert await queries.expired_stats(flow.daemon, RetentionSettings(stats_days=0)) == 0
    before = await _sums(flow)
    await queries.sweep_stats(flow.daemon, HOLDER, 10_000, RetentionSettings(stats_days=0))
    assert await _sums(flow) == before
    assert (await queries.sweep_stats(flow.daemon, "another", 10, settings)).refused
    removed = 0
    more = True
    while more:
        batch = await queries.sweep_stats(flow.daemon, HOLDER, 5000, settings)
        removed, more = removed + batch.removed["stats"], batch.more
    assert removed == expired
    assert await queries.expired_stats(flow.daemon, settings) == 0


async def test_erasure_removes_the_statistics(flow: Flow) -> None:
    """Of the erased subscription, in batches; the numbers of all together stay, and still match the jobs."""
    await flow.superuser.execute(AUDIT)
    subscription_id = await flow.subscribe("a.created")
    await flow.subscribe("b.created")
    for event_type in ("a.created", "b.created"):
        await flow.publish(event_type)
    await flow.route()
    await flow.attempt(200)
    await queries.request_subscription_erasure(flow.daemon, subscription_id, "me", None)
    await let_pass(flow.superuser, 0.001)
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(
            """
            insert into webhookd.delivery_stats_hours (subscription_id, hour)
            select $1, '2026-01-01'::timestamptz + h * interval '1 hour' from generate_series(1, 120) h
            """,
            subscription_id,
        )
    # A call removes at most 50 rows of statistics for each row of its batch.
    assert len(await erase(flow, batch_size=1)) == 1
    left = await flow.superuser.fetch(
        "select subscription_id, sum(delivered) from webhookd.delivery_stats group by 1 order by 1"
    )
    assert [tuple(row) for row in left] == [(0, 2), (subscription_id + 1, 1)]
    assert await differences(flow.superuser) == {}


@pytest.mark.parametrize("table", ["delivery_stats", "delivery_stats_hours"])
@pytest.mark.parametrize("statement", ["delete from webhookd.{}", "truncate webhookd.{}"])
async def test_owner_cannot_remove_statistics(flow: Flow, table: str, statement: str) -> None:
    """Only retention may."""
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local role webhookd_owner")
        with pytest.raises(asyncpg.PostgresError) as raised:
            await flow.superuser.execute(statement.format(table))
    assert raised.value.sqlstate == "WH410"


@pytest.mark.each_version
async def test_reads_use_the_primary_keys(flow: Flow) -> None:
    """No table is read as a whole, whatever is asked; a short period reads a few pages."""
    await flow.superuser.execute(MONTH)
    await flow.superuser.execute("analyze webhookd.delivery_stats, webhookd.delivery_stats_hours")
    now = await flow.daemon.fetchval("select now()")
    reads = {
        "an hour of one": (7, now - timedelta(hours=1), 2 * 61),
        "an hour of all": (None, now - timedelta(hours=1), 2 * 61),
        "a month of one": (7, now - timedelta(days=30), 2 * 720),
        "a month of all": (None, now - timedelta(days=30), 2 * 720),
    }
    for name, (subscription_id, since, rows) in reads.items():
        call = partial(totals, subscription_id=subscription_id, since=since)
        await call(flow.daemon)
        found, touched = await watch(flow.daemon, call)
        for table in ("delivery_stats", "delivery_stats_hours"):
            assert touched.scans[table] == 0, (name, table)
            assert touched.blocks[table] <= rows + ALLOWANCE_BLOCKS, (name, table, touched.blocks[table])
        assert found["delivered"] > 100, name
    many, touched = await watch(
        flow.daemon, lambda connection: stats.stats_of_many(connection, range(1, 51), None, 2)
    )
    assert [item["delivered"] for item in many["items"]] == [240] * 50
    assert touched.scans["delivery_stats"] == touched.scans["delivery_stats_hours"] == 0
    assert touched.blocks["delivery_stats"] < 50 * (240 + ALLOWANCE_BLOCKS)


@pytest.mark.each_version
async def test_updates_stay_in_their_page(flow: Flow) -> None:
    """An update writes no index entry: the counters have no index, and the pages have room."""
    await flow.subscribe()
    for _ in range(30):
        await flow.publish()
    await flow.route()
    await flow.start()
    for lease in await flow.claim():
        await sagas.complete(flow.daemon, [_report(lease, 200, 1)])
    await flow.daemon.execute("select pg_stat_force_next_flush()")
    row = await flow.superuser.fetchrow(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'delivery_stats'"
    )
    assert row is not None
    # A new minute may begin meanwhile.
    assert row["n_tup_upd"] == row["n_tup_hot_upd"] >= 50


async def _let_minutes_pass(flow: Flow, hours: float, number: int) -> None:
    """Write minutes of a subscription and of all together, up to some hours ago."""
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(
            """
            insert into webhookd.delivery_stats (subscription_id, minute, writer, delivered, durations)
            select s, date_bin('1 minute', now() - $1::interval, '2000-01-01 00:00:00+00')
                - n * interval '1 minute', 7, 1,
                '{1,0,0,0,0,0,0,0,0,0,0,0}'
            from generate_series(0, 1) s, generate_series(1, $2) n
            """,
            timedelta(hours=hours),
            number,
        )


async def _sums(flow: Flow) -> dict[str, int | None]:
    """Return the attempts in each table."""
    return {
        table: await flow.superuser.fetchval(f"select sum(delivered) from webhookd.{table}")
        for table in ("delivery_stats", "delivery_stats_hours")
    }
