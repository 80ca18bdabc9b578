"""[jobs]: a reload writes its numbers into the database, where everybody asks them."""

import json

import pytest

from tests.flow.conftest import MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.support.flow import Flow
from tests.support.waiting import until

NUMBERS = {
    "max_attempts": 7,
    "base_delay_seconds": 1.5,
    "max_delay_seconds": 60,
    "jitter": 0.25,
    "max_lease_recoveries": 0,
    "retention_seconds": 3600,
}
WRITTEN = """
    select count(*) = 6 from webhookd.settings s join jsonb_each($1::text::jsonb) n
    on s.key = 'queue.job_substrate.' || n.key and s.value = n.value
"""


@pytest.mark.once
@swaps(*(f"jobs.{name}" for name in NUMBERS))
async def test_the_numbers_of_jobs_are_written(flow: Flow, make_daemon: MakeDaemon) -> None:
    """Left alone at the start, for nothing was said; all of them after the reload that says them."""
    before = await flow.daemon.fetch("select * from webhookd.settings order by key")
    daemon = await make_daemon(services={"enabled": ["api", "jobs"]}).start()
    await daemon.until(lambda: daemon.get_json("/status")["job_queue"], "seen")
    assert await flow.daemon.fetch("select * from webhookd.settings order by key") == before
    daemon.configure(jobs=NUMBERS)
    assert await daemon.reload()
    await until(flow.daemon, WRITTEN, json.dumps(NUMBERS))
    await daemon.until(lambda: daemon.logged("were written into the database"), "logged")
    [written] = daemon.logged("were written into the database")
    assert written["max_attempts"] == 7
