"""Reload of the retention periods."""

from tests.flow.conftest import MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.support.flow import Flow
from tests.support.sweeps import let_pass
from tests.support.waiting import until
from webhookd.core.states import SagaStatus

STATS = """
    set session_replication_role = replica;
    insert into webhookd.delivery_stats_hours (subscription_id, hour)
    values (0, date_trunc('hour', now() - interval '10 days'));
    set session_replication_role = origin;
"""
JOBS = """
    select webhookd.fn_job_enable(true, 'me');
    select webhookd.fn_job_workflow_open('batch', 'cron', 'me');
    select webhookd.fn_job_enqueue('report', 'one', 'DOT', p_actor => 'me',
                                   p_workflow_id => (select workflow_id from webhookd.job_workflow));
    select webhookd.fn_job_cancel((select job_id from webhookd.job_queue), 'old', 'me');
"""


@swaps(
    "retention.events_days",
    "retention.dead_letters_days",
    "retention.payloads_days",
    "retention.jobs_days",
    "retention.job_ledger_days",
    "retention.job_workflows_days",
    "retention.stats_days",
)
async def test_periods_are_reloaded(flow: Flow, make_daemon: MakeDaemon) -> None:
    """The next pass, which the reload starts, uses all of them."""
    await flow.saga_in(SagaStatus.DEAD_LETTERED)
    for statement in JOBS.strip().split(";")[:-1]:
        await flow.daemon.execute(statement)
    await flow.route()
    await flow.saga_in(SagaStatus.COMPLETED, subscription_id=1)
    await let_pass(flow.superuser, 40)
    await flow.saga_in(SagaStatus.COMPLETED, subscription_id=1)
    await let_pass(flow.superuser, 10)
    await flow.superuser.execute(STATS)
    daemon = await make_daemon(services={"enabled": ["api", "retention"]}).start()
    daemon.configure(
        retention={
            "events_days": 30,
            "dead_letters_days": 60,
            "payloads_days": 7,
            "jobs_days": 30,
            "job_ledger_days": 30,
            "job_workflows_days": 30,
            "stats_days": 7,
        }
    )
    assert await daemon.reload()
    await until(flow.daemon, "select not exists (select from webhookd.job_command_run)")
    await until(flow.daemon, "select not exists (select from webhookd.job_queue)")
    await until(flow.daemon, "select count(*) = 2 from webhookd.events")
    await until(flow.daemon, "select not exists (select from webhookd.delivery_stats_hours)")
    removed = "select array_agg(payload_removed_at is not null order by id) from webhookd.events"
    await until(flow.daemon, f"select ({removed}) = array[false, true]")
    daemon.sighup()  # workflows go after their jobs, in the next pass at the latest
    await until(flow.daemon, "select not exists (select from webhookd.job_workflow)")
    daemon.configure(retention={"dead_letters_days": 45})
    assert await daemon.reload()
    await until(flow.daemon, "select count(*) = 1 from webhookd.events")
    assert daemon.faults() == []
