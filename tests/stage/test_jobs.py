"""The jobs service's loop: what it costs while the substrate is off, and whose numbers hold."""

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
    """The service of this process."""
    return JobKeeper(parts.context)


async def test_it_costs_a_look_now_and_then_while_off(flow: Flow, counted: CountingPool) -> None:
    """Off, events ring for nothing: within a poll interval there is one statement, however many come."""
    parts = Parts(counted, settings=Settings(services=LONG))
    async with running(keeper_of(parts).run):
        for _ in range(50):
            await flow.publish()
            parts.wakeups.wake(Work.EVENTS, search=True)
    assert counted.uses == 1


async def test_numbers_of_the_file_are_written_once(flow: Flow, parts: Parts) -> None:
    """At the start and when a reload changes them; what somebody sets in the database meanwhile stays."""
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
        # Cancelled for its deadline: the loop has gone round since.
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


async def test_numbers_that_do_not_fit_stop_nothing(
    flow: Flow, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """A base delay above the longest that the database has is told once, and the jobs are looked after."""
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
    told = [record.getMessage() for record in caplog.records if "[jobs]" in record.getMessage()]
    assert len(told) == 1
    assert "base_delay_seconds must not be above max_delay_seconds" in told[0]
    assert await flow.daemon.fetchval(IS, "base_delay_seconds", 30)
