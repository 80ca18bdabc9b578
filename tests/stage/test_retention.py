"""The loop of retention: the size of its batches, and a reload in the middle of a pass."""

import pytest

from tests.flow.test_lifecycle import publish_many
from tests.support.database import Database
from tests.support.flow import Flow
from tests.support.sweeps import let_pass
from webhookd.core.metrics import Metrics
from webhookd.core.settings import RetentionSettings
from webhookd.db.pool import Pool
from webhookd.retention import sweeper as sweeper_module
from webhookd.retention.sweeper import (
    FIRST_BATCH,
    LARGEST_BATCH,
    LEAST_REST_FACTOR,
    REQUESTED_REST_FACTOR,
    REST_FACTOR,
    SMALLEST_BATCH,
    BatchSize,
    Pace,
    Sweeper,
)


def test_batch_size_follows_the_duration() -> None:
    """It doubles or halves at most, within its bounds, and shrinks after a lock timeout."""
    size = BatchSize()
    size.took(0.001)
    assert size.rows == 2 * FIRST_BATCH
    size.took(10)
    size.was_blocked()
    assert size.rows == FIRST_BATCH // 2
    for _ in range(20):
        size.was_blocked()
    assert size.rows == SMALLEST_BATCH
    for _ in range(20):
        size.took(0)
    assert size.rows == LARGEST_BATCH


def test_sweep_that_loses_ground_rests_less() -> None:
    """Each time that more remains than before; a sweep that keeps up never hurries."""
    pace = Pace(REST_FACTOR)
    for remaining in (500, 400, 400, 300):
        pace.remaining_is(remaining)
    assert pace.rest_factor == REST_FACTOR
    pace.remaining_is(350)
    assert pace.rest_factor == REST_FACTOR / 2
    for remaining in range(1000, 2000, 100):
        pace.remaining_is(remaining)
    assert pace.rest_factor == LEAST_REST_FACTOR


@pytest.mark.parametrize("kind", ["events", "payloads"])
async def test_sweep_counts_what_remains(
    flow: Flow, database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With each batch here; in production once a minute."""
    await publish_many(flow, 3 * FIRST_BATCH, ["orders"])
    await flow.route()
    await let_pass(flow.superuser, 31)
    monkeypatch.setattr(sweeper_module, "PACE_SECONDS", 0.0)
    monkeypatch.setattr(BatchSize, "took", lambda *_: None)
    seen: list[int] = []
    monkeypatch.setattr(Pace, "remaining_is", lambda _, events: seen.append(events))
    settings = RetentionSettings(events_days=30, payloads_days=30)
    async with Pool(database.dsn("daemon"), 2) as pool:
        sweeper = Sweeper(pool, "test", lambda: settings, Metrics())
        [step] = [step for step in sweeper.steps() if step.name == kind]
        async for _ in sweeper.batches(step):
            pass
    assert seen[:3] == [3 * FIRST_BATCH, 2 * FIRST_BATCH, FIRST_BATCH]


async def test_requested_work_rests_less(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person waits for an erasure and for `retention run`, and for nothing else of the service."""
    given: list[float] = []

    class RecordedPace(Pace):
        def __init__(self, rest_factor: float) -> None:
            given.append(rest_factor)
            super().__init__(rest_factor)

    monkeypatch.setattr(sweeper_module, "Pace", RecordedPace)
    settings = RetentionSettings(events_days=30, payloads_days=30, jobs_days=30)
    factors: dict[tuple[str, bool], float] = {}
    async with Pool(database.dsn("daemon"), 2) as pool:
        for is_requested in (False, True):
            sweeper = Sweeper(pool, "test", lambda: settings, Metrics(), is_requested=is_requested)
            for step in sweeper.steps():
                async for _ in sweeper.batches(step):
                    pass
                factors[step.name, is_requested] = given.pop()
    assert len(factors) == 12
    for (name, is_requested), factor in factors.items():
        is_urgent = is_requested or name == "erasures"
        assert factor == (REQUESTED_REST_FACTOR if is_urgent else REST_FACTOR), name


async def test_reload_ends_a_running_sweep(flow: Flow, database: Database) -> None:
    """Periods that are removed take effect after the batch that runs, not after the pass."""
    await publish_many(flow, 3 * FIRST_BATCH, ["orders"])
    await flow.route()
    await let_pass(flow.superuser, 31)
    settings = [RetentionSettings(events_days=30)]
    async with Pool(database.dsn("daemon"), 2) as pool:
        sweeper = Sweeper(pool, "test", lambda: settings[0], Metrics())
        [step] = [step for step in sweeper.steps() if step.name == "events"]
        removed = 0
        async for batch in sweeper.batches(step):
            removed += batch.removed["events"]
            settings[0] = RetentionSettings()
    assert removed == FIRST_BATCH
    assert await flow.superuser.fetchval("select count(*) from webhookd.events") == 2 * FIRST_BATCH
