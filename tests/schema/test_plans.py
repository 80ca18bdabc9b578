"""Query plans of the hot functions, checked by what they read beside 200,000 and 20,000 finished deliveries.

EXPLAIN does not see statements inside PL/pgSQL functions. So the tests call each function as the daemon does,
with a backlog of 10,000, and read the session's counters of scans and blocks.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import asyncpg
import pytest

from tests.support.database import Cluster, Database
from tests.support.history import (
    FEW_LETTERS,
    LONG_SECONDS,
    POLICY,
    RARE_ERROR,
    SUBSCRIPTION_OF_FEW_LETTERS,
    UNLIMITED,
    Touched,
    claim,
    copy_database,
    new_event,
    past_key,
    subscription_ids,
    vacuum,
    watch,
    write_backlog,
    write_history,
)
from tests.support.nightly import first_in_gate
from tests.support.postgres import run_apart
from webhookd.deliveries import attempts, dead_letters, ingest, reads, router, sagas

if TYPE_CHECKING:
    from tests.support.database import Connection

Result = TypeVar("Result")

SHORT = 20_000
LONG = 200_000
# PL/pgSQL may switch a statement to a generic plan at its sixth execution.
EXECUTIONS = 7
# No sequential scan of these tables is allowed; subscriptions and their details are few.
GROWING_TABLES = (
    "events",
    "event_routing_queue",
    "webhook_delivery_sagas",
    "webhook_delivery_jobs",
    "dead_letters",
)
BATCH = 100
# A btree of 20,000 entries has two levels, one of 200,000 three: a descent reads three blocks instead of two,
# plus one block of the table in both. The allowance covers what does not repeat: a page split, free space in
# another page, the planner's lookup of the ends of an index; and the rows of a batch that lie on separate
# pages in the longer table.
GROWTH = 1.5
ALLOWANCE_BLOCKS = 40
# How many batches of rows of one table a call reads, if more than one.
BATCHES = {"backlog": 3}  # attempts to claim, leased and reported


BURY = POLICY._replace(max_attempts=1)

# Each hot call of a round, and the indexes of growing tables that it needs. Primary keys serve updates and
# joins by id; a unique index is also listed where it is the arbiter of ON CONFLICT.
SERVED_BY = {
    "publish_many": (),
    "publish_many, keys": ("uniq_event_idempotency_key",),
    "route_events": ("event_routing_queue_pkey", "events_pkey"),
    "due_subscriptions": ("idx_saga_pending", "idx_saga_subscription_due"),
    "backlog": (
        "event_routing_queue_pkey",
        "events_pkey",
        "idx_saga_pending",
        "idx_saga_subscription_due",
        "idx_saga_status_retry",
        "idx_job_status_lease",
        "idx_job_unapplied",
    ),
    "start_due_sagas": (
        "idx_saga_in_progress",
        "idx_saga_pending",
        "idx_saga_subscription_due",
        "webhook_delivery_sagas_pkey",
    ),
    "claim_jobs": ("idx_job_status_lease", "webhook_delivery_jobs_pkey", "events_pkey"),
    "release_jobs": ("webhook_delivery_jobs_pkey",),
    "load_payloads": ("webhook_delivery_jobs_pkey", "events_pkey"),
    "complete_deliveries": ("webhook_delivery_jobs_pkey", "webhook_delivery_sagas_pkey"),
    "report_results": ("webhook_delivery_jobs_pkey",),
    "apply_results, successes known": ("webhook_delivery_jobs_pkey", "webhook_delivery_sagas_pkey"),
    "apply_results, successes": (
        "idx_job_unapplied",
        "webhook_delivery_jobs_pkey",
        "webhook_delivery_sagas_pkey",
    ),
    "apply_results, retries": (
        "idx_job_unapplied",
        "webhook_delivery_jobs_pkey",
        "webhook_delivery_sagas_pkey",
    ),
    "apply_results, dead letters": ("idx_job_unapplied", "webhook_delivery_sagas_pkey", "idx_dead_saga"),
    "dead_letter_exhausted": ("idx_saga_status", "webhook_delivery_sagas_pkey", "idx_dead_saga"),
    "dead_letter_exhausted, none": ("idx_saga_status",),
    "reset_expired_leases": ("idx_job_status_lease", "webhook_delivery_jobs_pkey"),
    "requeue_dead_letter": ("uniq_saga_dead_letter",),
    "requeue_dead_letters, subscription": ("idx_dead_subscription", "uniq_saga_dead_letter"),
    "requeue_dead_letters, error code": ("idx_dead_error", "uniq_saga_dead_letter"),
    "requeue_dead_letters, time": ("idx_dead_failed", "uniq_saga_dead_letter"),
}
# Without this one PostgreSQL refuses ON CONFLICT; without the others a call reads more.
ARBITERS = ("uniq_event_idempotency_key",)
# These replace each other here, where dead letters are few; test_pages.py checks each.
OF_DEAD_LETTERS = ("idx_dead_error", "idx_dead_failed", "idx_dead_subscription")
# Others replace these for a few retries: the backlog counts no more of them than a batch.
OF_RETRIES = ("idx_saga_status_retry", "idx_saga_subscription_due")
INDEXES = sorted(
    {index for indexes in SERVED_BY.values() for index in indexes}.difference(
        ARBITERS, OF_DEAD_LETTERS, OF_RETRIES
    )
)


class Statistics(StrEnum):
    """What the planner knows."""

    FRESH = "fresh"  # the tables were analyzed with the backlog
    STALE = "stale"  # the backlog came after the analysis
    IDLE = "idle"  # like STALE, and the session made its plans while there was no work


class Rounds:
    """One session of the daemon that makes every hot call in each round, and what each call read last."""

    def __init__(self, daemon: "Connection") -> None:
        self.daemon = daemon
        self.touched: dict[str, Touched] = {}
        self._round = 0
        self._requeued_up_to_id = 0

    async def ask_for_work(self) -> None:
        """Look for work often enough that plans are kept."""
        for _ in range(EXECUTIONS):
            assert (await router.route(self.daemon, BATCH)).events == 0
            assert await sagas.due_subscriptions(self.daemon, 0, BATCH) == []
            await self._start()
            assert await claim(self.daemon, BATCH) == []
            assert await self._apply() == []
            assert await attempts.reset_expired(self.daemon, BATCH, max_lease_resets=5) == []
            assert (await sagas.dead_letter_exhausted(self.daemon, 0, BATCH, 1)).last_saga_id is None

    async def go(self, rounds: int = EXECUTIONS) -> dict[str, Touched]:
        """Make every hot call in each of the rounds."""
        for _ in range(rounds):
            await self._ingest()
            await self._prepare()
            await self._deliver()
            await self._reset()
            await self._requeue(await self._bury())
            self._round += 1
        return self.touched

    async def _ingest(self) -> None:
        await self._watch("publish_many", lambda c: ingest.publish(c, [new_event(n) for n in range(BATCH)]))
        # Half of the keys are new, half belong to the same event of the history.
        places = range(self._round * BATCH, (self._round + 1) * BATCH)
        keyed = [new_event(place, f"new-{place}") for place in places if place % 2]
        known = [new_event(place, past_key(place)) for place in places if not place % 2]
        accepted = await self._watch("publish_many, keys", lambda c: ingest.publish(c, keyed + known))
        assert [event.duplicate for event in accepted] == [False] * len(keyed) + [True] * len(known)
        routed = await self._watch("route_events", lambda c: router.route(c, BATCH))
        assert routed.events == BATCH

    async def _prepare(self) -> None:
        due = await self._watch("due_subscriptions", lambda c: sagas.due_subscriptions(c, 0, UNLIMITED))
        assert len(due) == len(subscription_ids())
        stages = await self._watch("backlog", lambda c: reads.waiting(c, BATCH))
        assert [stage.stage for stage in stages if stage.waiting == BATCH]
        started = await self._watch("start_due_sagas", lambda _: self._start())
        assert sum(each.started for each in started) > BATCH

    async def _deliver(self) -> None:
        leases = await self._watch("claim_jobs", lambda c: claim(c, BATCH))
        assert len(leases) == BATCH
        returned, completed, known, delivered, failed = (
            leases[start:end] for start, end in ((0, 20), (20, 30), (30, 40), (40, 70), (70, BATCH))
        )
        assert len(await self._watch("release_jobs", lambda c: attempts.release(c, returned))) == len(
            returned
        )
        loaded = await self._watch("load_payloads", lambda c: attempts.load(c, leases[20:]))
        assert len(loaded) == len(leases[20:])
        reports = [attempts.Report(lease.job_id, lease.lease_token, 200) for lease in completed]
        done = await self._watch("complete_deliveries", lambda c: sagas.complete(c, reports))
        assert len(done) == len(completed)
        await self._report(known, 200)
        ids = [lease.job_id for lease in known]
        applied = await self._watch(
            "apply_results, successes known",
            lambda c: sagas.apply_results(c, BATCH, POLICY, UNLIMITED, reported_job_ids=ids),
        )
        assert len(applied) == len(known)
        await self._report(delivered, 200)
        assert len(await self._watch("apply_results, successes", lambda _: self._apply())) == len(delivered)
        await self._report(failed, 500)
        assert len(await self._watch("apply_results, retries", lambda _: self._apply())) == len(failed)

    async def _bury(self) -> int:
        """Return the id of a new dead letter."""
        leases = await claim(self.daemon, 20)
        await self._report(leases, 500)
        dead_lettered = await self._watch("apply_results, dead letters", lambda _: self._apply(BURY))
        swept = await self._watch(
            "dead_letter_exhausted", lambda c: sagas.dead_letter_exhausted(c, 0, BATCH, max_attempts=1)
        )
        assert len(swept.dead_lettered) == BATCH
        await self._watch(
            "dead_letter_exhausted, none", lambda c: sagas.dead_letter_exhausted(c, 0, BATCH, max_attempts=5)
        )
        dead_letter_id = dead_lettered[0].dead_letter_id
        assert dead_letter_id is not None
        return dead_letter_id

    async def _reset(self) -> None:
        lost = await claim(self.daemon, 20, lease_seconds=0.000001)
        reset = await self._watch("reset_expired_leases", lambda c: attempts.reset_expired(c, BATCH, 5))
        assert len(reset) == len(lost)

    async def _requeue(self, dead_letter_id: int) -> None:
        one = await self._watch("requeue_dead_letter", lambda c: dead_letters.requeue(c, dead_letter_id))
        assert one.created
        # All of a subscription, all of an error code, and the next few of this hour.
        of_subscription = dead_letters.Filter(subscription_id=SUBSCRIPTION_OF_FEW_LETTERS)
        all_of_it = await self._requeue_many("subscription", of_subscription, 0, BATCH)
        assert all_of_it.matched >= FEW_LETTERS
        of_error = dead_letters.Filter(error_code=RARE_ERROR)
        all_of_it = await self._requeue_many("error code", of_error, 0, BATCH)
        assert all_of_it.matched >= FEW_LETTERS
        of_this_hour = dead_letters.Filter(failed_after=datetime.now(UTC) - timedelta(seconds=LONG_SECONDS))
        page = await self._requeue_many("time", of_this_hour, self._requeued_up_to_id, FEW_LETTERS)
        assert page.requeued >= FEW_LETTERS - 1
        self._requeued_up_to_id = page.last_id

    async def _requeue_many(
        self, name: str, which: dead_letters.Filter, after_id: int, batch_size: int
    ) -> dead_letters.RequeuedMany:
        return await self._watch(
            f"requeue_dead_letters, {name}",
            lambda c: dead_letters.requeue_many(c, which, after_id, batch_size, dry_run=False),
        )

    async def _start(self) -> list[sagas.Started]:
        """Start one attempt for every second subscription."""
        shares = [sagas.Share(subscription_id, quota=1) for subscription_id in subscription_ids()[::2]]
        return await sagas.start(self.daemon, shares, UNLIMITED, POLICY.max_attempts)

    async def _report(self, leases: list[attempts.Lease], response_status: int) -> None:
        reports = [attempts.Report(lease.job_id, lease.lease_token, response_status) for lease in leases]
        await self._watch("report_results", lambda c: attempts.report(c, reports))

    async def _apply(self, policy: sagas.RetryPolicy = POLICY) -> list[sagas.Transition]:
        return await sagas.apply_results(self.daemon, BATCH, policy, UNLIMITED)

    async def _watch(self, name: str, call: "Callable[[Connection], Awaitable[Result]]") -> Result:
        result, self.touched[name] = await watch(self.daemon, call)
        return result


class Laboratory:
    """Both histories of a server, and what calls read beside them, also without an index."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._past: dict[int, Database] = {}
        self._past_with_backlog: dict[int, Database] = {}
        self._observed: dict[tuple[int, str | None], Future[dict[str, Touched]]] = {}

    def touched(self, size: int, statistics: Statistics) -> dict[str, Touched]:
        """Return what each hot call read once its plan was settled, beside a history of this size."""
        return self._once((size, statistics), self._observe(size, statistics))

    def touched_at_first(self, size: int, *, without: str | None = None) -> dict[str, Touched]:
        """Return what each call read in the first round, optionally without an index."""
        return self._once((size, without), self._observe_first(size, without))

    def close(self) -> None:
        """Drop the histories."""
        for database in [*self._past.values(), *self._past_with_backlog.values()]:
            run_apart(self._cluster.drop_database(database))

    def _once(
        self, key: tuple[int, str | None], observation: Coroutine[None, None, dict[str, Touched]]
    ) -> dict[str, Touched]:
        """Observe once, also after a failure: then every test fails in the same way at once."""
        if key in self._observed:
            observation.close()
        else:
            self._observed[key] = Future()
            try:
                self._observed[key].set_result(run_apart(observation))
            except Exception as error:
                self._observed[key].set_exception(error)
        return self._observed[key].result()

    async def _observe(self, size: int, statistics: Statistics) -> dict[str, Touched]:
        match statistics:
            case Statistics.IDLE:
                async with self._copy(await self._history(size)) as database:
                    rounds = Rounds(await database.connect())
                    await rounds.ask_for_work()
                    await write_backlog(await database.connect())
                    return await rounds.go()
            case Statistics.STALE:
                async with self._copy(await self._history_with_backlog(size)) as database:
                    return await Rounds(await database.connect()).go()
            case Statistics.FRESH:
                async with self._copy(await self._history_with_backlog(size)) as database:
                    await vacuum(await database.connect("superuser"))
                    return await Rounds(await database.connect()).go()

    async def _observe_first(self, size: int, without: str | None) -> dict[str, Touched]:
        async with self._copy(await self._history_with_backlog(size)) as database:
            if without is not None:
                await drop_index(await database.connect("superuser"), without)
            return await Rounds(await database.connect()).go(rounds=1)

    async def _history(self, size: int) -> Database:
        if size not in self._past:
            database = await self._cluster.create_database(migrated=True)
            await write_history(await database.connect("superuser"), size)
            await database.close()
            self._past[size] = database
        return self._past[size]

    async def _history_with_backlog(self, size: int) -> Database:
        if size not in self._past_with_backlog:
            database = await copy_database(await self._history(size))
            await write_backlog(await database.connect())
            await database.close()
            self._past_with_backlog[size] = database
        return self._past_with_backlog[size]

    @contextlib.asynccontextmanager
    async def _copy(self, original: Database) -> AsyncIterator[Database]:
        database = await copy_database(original)
        try:
            yield database
        finally:
            await self._cluster.drop_database(database)


@pytest.fixture(scope="session")
def laboratory(cluster: Cluster) -> Iterator[Laboratory]:
    """Keep one per server: writing a history of 200,000 takes seconds."""
    laboratory = Laboratory(cluster)
    yield laboratory
    laboratory.close()


async def drop_index(superuser: "Connection", index: str) -> None:
    """Drop an index, or the constraint of a primary key with all references to it."""
    table = index.removesuffix("_pkey")
    if table == index:
        await superuser.execute(f"drop index webhookd.{index}")
    else:
        await superuser.execute(f"alter table webhookd.{table} drop constraint {index} cascade")


def scanned_tables(touched: Touched) -> dict[str, int]:
    """Return the growing tables with sequential scans, and how often."""
    return {table: touched.scans[table] for table in GROWING_TABLES if touched.scans[table]}


def grown(call: str, short: Touched, long: Touched) -> dict[str, tuple[int, int]]:
    """Return the growing tables of which a call read more blocks than a btree level explains."""
    allowance = ALLOWANCE_BLOCKS + BATCH * BATCHES.get(call, 1)
    return {
        table: (short.blocks[table], long.blocks[table])
        for table in GROWING_TABLES
        if long.blocks[table] > GROWTH * short.blocks[table] + allowance
    }


@pytest.mark.parametrize("call", SERVED_BY)
@pytest.mark.parametrize("statistics", Statistics)
def test_no_hot_call_scans_a_growing_table(laboratory: Laboratory, statistics: Statistics, call: str) -> None:
    """No growing table is scanned sequentially, with any statistics."""
    assert scanned_tables(laboratory.touched(LONG, statistics)[call]) == {}


@pytest.mark.parametrize("call", [call for call, indexes in SERVED_BY.items() if indexes])
@pytest.mark.parametrize("statistics", Statistics)
def test_hot_call_uses_its_indexes(laboratory: Laboratory, statistics: Statistics, call: str) -> None:
    """A call uses each index that the schema names for it."""
    scans = laboratory.touched(LONG, statistics)[call].scans
    assert [index for index in SERVED_BY[call] if not scans[index]] == []


@pytest.mark.parametrize("call", SERVED_BY)
@pytest.mark.parametrize("statistics", Statistics)
def test_cost_of_a_hot_call_does_not_grow_with_the_history(
    laboratory: Laboratory, statistics: Statistics, call: str
) -> None:
    """Ten times the history costs a call only the deeper btrees."""
    short = laboratory.touched(SHORT, statistics)[call]
    long = laboratory.touched(LONG, statistics)[call]
    assert grown(call, short, long) == {}


@pytest.mark.parametrize("call", SERVED_BY)
@pytest.mark.parametrize("statistics", [Statistics.STALE, Statistics.IDLE])
def test_statistics_do_not_change_the_cost(laboratory: Laboratory, statistics: Statistics, call: str) -> None:
    """A plan made without knowing the backlog reads as much as a plan made for it."""
    fresh = laboratory.touched(LONG, Statistics.FRESH)[call]
    other = laboratory.touched(LONG, statistics)[call]
    assert grown(call, fresh, other) == {}


@pytest.mark.once  # tests the checks above, which are the same on every PostgreSQL version
@pytest.mark.parametrize("index", first_in_gate(INDEXES))
def test_missing_index_is_noticed(laboratory: Laboratory, index: str) -> None:
    """Without an index, a call that needs it fails the checks that do not name the index."""
    usual = laboratory.touched_at_first(SHORT)
    without = laboratory.touched_at_first(LONG, without=index)
    served = [call for call, indexes in SERVED_BY.items() if index in indexes]
    assert [
        call for call in served if scanned_tables(without[call]) or grown(call, usual[call], without[call])
    ]


@pytest.mark.parametrize("index", first_in_gate(ARBITERS))
def test_missing_arbiter_is_refused(laboratory: Laboratory, index: str) -> None:
    """PostgreSQL refuses ON CONFLICT without its unique index, so nothing is written twice."""
    with pytest.raises(asyncpg.InvalidColumnReferenceError):
        laboratory.touched_at_first(LONG, without=index)


def test_first_round_passes_with_every_index(laboratory: Laboratory) -> None:
    """The same first round passes the checks that fail without an index."""
    usual = laboratory.touched_at_first(SHORT)
    first = laboratory.touched_at_first(LONG)
    assert [
        call for call in SERVED_BY if scanned_tables(first[call]) or grown(call, usual[call], first[call])
    ] == []


async def test_function_with_planner_settings_disables_jit(database: Database) -> None:
    """A function that disables a planner node also disables JIT; the test servers have JIT off.

    Up to PostgreSQL 17 a disabled but unavoidable node, a sort or the scan of a one-row table, costs 10^10,
    and JIT compiles plans that cost more than 10^5: with default settings the whole cycle took 20 times the
    CPU time.
    """
    superuser = await database.connect("superuser")
    compiled = await superuser.fetch(r"""
        select p.proname from pg_proc p
        where p.pronamespace = 'webhookd'::regnamespace and 'jit=off' <> all(p.proconfig)
            and exists (select from unnest(p.proconfig) setting where setting like 'enable\_%=off')
    """)
    assert [function["proname"] for function in compiled] == []


async def test_counters_see_one_call_of_one_session(database: Database) -> None:
    """A scan and a descent count once, by name; earlier calls and other sessions do not count."""
    watched, other = await database.connect("superuser"), await database.connect("superuser")

    async def look(connection: "Connection") -> None:
        await connection.fetch("select from webhookd.events")
        await connection.execute("set local enable_seqscan = off")
        await connection.fetch("select from webhookd.dead_letters where saga_id = 1")

    async def look_beside_another(connection: "Connection") -> None:
        async with other.transaction():
            await look(other)
        await look(connection)

    async with watched.transaction():
        await look(watched)
    _, touched = await watch(watched, look_beside_another)
    assert {name: count for name, count in touched.scans.items() if count} == {
        "events": 1,
        "idx_dead_saga": 1,
    }
    assert touched.blocks["dead_letters"] > 0
