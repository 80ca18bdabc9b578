"""The `jobs` service: its cost while the queue is disabled, and the settings of [jobs]."""

import pytest

from tests.stage.conftest import CountingPool, Parts, running
from tests.support.flow import Flow
from tests.support.waiting import until
from webhookd.core.settings import JobsSettings, ServicesSettings, Settings
from webhookd.jobqueue.keeper import JobKeeper
from webhookd.wakeups import Work

LONG = ServicesSettings(poll_interval_seconds=3600)
IS = "select value = to_jsonb($2::numeric) from webhookd.settings where key = 'queue.job_substrate.' || $1"


def keeper_of(parts: Parts) -> JobKeeper:
    """The service under test."""
    return JobKeeper(parts.context)


async def test_disabled_queue_costs_one_statement_per_interval(flow: Flow, counted: CountingPool) -> None:
    """While disabled, one statement runs per poll interval, however many events arrive."""
    parts = Parts(counted, settings=Settings(services=LONG))
    async with running(keeper_of(parts).run):
        for _ in range(50):
            await flow.publish()
            parts.wakeups.wake(Work.EVENTS, search=True)
    assert counted.uses == 1


async def test_jobs_settings_are_written_once(flow: Flow, parts: Parts) -> None:
    """Written at the start and after a changed reload; changes in the database in between stay."""
    await flow.daemon.execute("select webhookd.fn_job_enable(true, 'test')")
    parts.settings = Settings(
        services=ServicesSettings(poll_interval_seconds=0.05), jobs=JobsSettings(max_attempts=7)
    )
    async with running(keeper_of(parts).run):
        await until(flow.daemon, IS, "max_attempts", 7)
        await flow.daemon.execute("""select webhookd.fn_job_configure('{"max_attempts": 9}', 'test')""")
        before = await flow.daemon.fetchval(
            "select webhookd.fn_job_enqueue('k', 'key', 'Agent', p_deadline_at => now() + interval '0.1 s',"
            " p_actor => 'test') ->> 'job_id'"
        )
        # The deadline cancelled it: the loop has completed a pass since.
        await until(
            flow.daemon,
            "select status = 'cancelled' from webhookd.job_queue where job_id = $1::text::uuid",
            before,
        )
        assert await flow.daemon.fetchval(IS, "max_attempts", 9)
        parts.settings = Settings(services=parts.settings.services, jobs=JobsSettings(jitter=0.5))
        parts.wakeups.wake_all()
        await until(flow.daemon, IS, "jitter", 0.5)
        assert await flow.daemon.fetchval(IS, "max_attempts", 9)
    assert (
        parts.metrics.registry.get_sample_value("webhookd_job_queue_reaped_total", {"outcome": "cancelled"})
        == 1.0
    )


async def test_conflicting_settings_do_not_stop_the_service(
    flow: Flow, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """A base delay above the database's maximum is logged once, and the service keeps working."""
    await flow.daemon.execute("select webhookd.fn_job_enable(true, 'test')")
    parts.settings = Settings(
        services=ServicesSettings(poll_interval_seconds=0.05), jobs=JobsSettings(base_delay_seconds=7200)
    )
    late = await flow.daemon.fetchval(
        "select webhookd.fn_job_enqueue('k', 'key', 'Agent', p_deadline_at => now(), p_actor => 'test')"
        " ->> 'job_id'"
    )
    async with running(keeper_of(parts).run):
        await until(
            flow.daemon,
            "select status = 'cancelled' from webhookd.job_queue where job_id = $1::text::uuid",
            late,
        )
    logged = [record.getMessage() for record in caplog.records if "[jobs]" in record.getMessage()]
    assert len(logged) == 1
    assert "base_delay_seconds must not be above max_delay_seconds" in logged[0]
    assert await flow.daemon.fetchval(IS, "base_delay_seconds", 30)
