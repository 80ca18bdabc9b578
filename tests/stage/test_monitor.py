"""The monitor: the numbers of the job queue are the same wherever they are shown."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.stage.conftest import Parts
from tests.support.database import Database
from tests.support.job_queue import ACTOR, KIND, JobQueue, Status
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS
from webhookd.core.metrics import JOB_QUEUE
from webhookd.daemon import status as status_module
from webhookd.daemon.status import COUNTED_UP_TO, Monitor, StatusReporter

# All different, so that a mix-up is noticed: `enabled` is 1, the age at least 1000.
COUNTS = {
    "events_waiting": 2,
    "dead_letter_open": 3,
    "retry_waiting": 4,
    "scheduled": 5,
    "lease_active": 6,
    "in_progress": 7,
    "backlog": 8,
}


async def fill(queue: JobQueue) -> None:
    """Create jobs and events as in COUNTS; the oldest is 1000 seconds old."""
    await queue.call(
        "fn_job_register_event", p_event_type="a.b", p_kind=KIND, p_executor="DOT", p_actor=ACTOR
    )
    for _ in range(COUNTS["events_waiting"]):
        await queue.daemon.execute("select webhookd.publish('a.b', '{}')")
    for status in (Status.DEAD_LETTER, Status.RETRY_WAITING):
        for _ in range(COUNTS["dead_letter_open" if status is Status.DEAD_LETTER else "retry_waiting"]):
            await queue.job_in(status)
    held = [await queue.job_in(Status.LEASED) for _ in range(COUNTS["in_progress"])]
    for expired in held[COUNTS["lease_active"] :]:
        await queue.expire(expired)
    for _ in range(COUNTS["scheduled"]):
        await queue.enqueue(p_process_after=datetime.now(UTC) + timedelta(hours=1))
    queued = [await queue.enqueue() for _ in range(COUNTS["backlog"] - COUNTS["scheduled"])]
    await queue.superuser.execute(
        "update webhookd.job_queue set process_after = now() - interval '1000 s' where job_id = $1", queued[0]
    )


async def test_status_and_gauges_show_what_the_health_function_counts(
    database: Database, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number appears under its own name in fn_job_queue_health, /status and the metrics."""
    monkeypatch.setattr(status_module, "TIMEOUT_SECONDS", CONDITION_TIMEOUT_SECONDS)
    queue = await JobQueue.open(database)
    await fill(queue)
    counted = await queue.call("fn_job_queue_health")
    monitor = Monitor(parts.context)
    await monitor.run_once()
    status = StatusReporter(parts.context, monitor, lambda: 0)
    shown = dict(status.describe()["job_queue"] or {})
    gauges = {
        name.removeprefix("job_queue_"): parts.metrics.registry.get_sample_value(f"webhookd_{name}")
        for name in JOB_QUEUE
    }

    ages = [counted.pop("oldest_queued_age_s"), shown.pop("oldest_queued_age_s")]
    ages.append(gauges.pop("oldest_queued_age_seconds"))
    assert all(1000 <= age < 1100 for age in ages), ages
    bound = {"counted_up_to": COUNTED_UP_TO}
    assert counted == COUNTS | bound | {"enabled": True}
    assert shown == COUNTS | bound | {"enabled": True}
    assert gauges == COUNTS | {"enabled": 1}


async def test_help_text_of_a_gauge_names_the_bound(database: Database, parts: Parts) -> None:
    """The bound of fn_job_queue_health is the same as that of the backlog gauges."""
    queue = await JobQueue.open(database)
    bound = (await queue.call("fn_job_queue_health"))["counted_up_to"]
    assert bound == COUNTED_UP_TO
    helps = {metric.name: metric.documentation for metric in parts.metrics.registry.collect()}
    counts = [f"webhookd_job_queue_{name}" for name in COUNTS]
    for name in [*counts, "webhookd_backlog"]:
        assert helps[name].endswith(f", up to {bound:,}"), name
