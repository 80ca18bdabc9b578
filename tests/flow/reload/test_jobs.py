"""[jobs]: a reload writes its settings to the database, which all instances share."""

import json

import pytest

from tests.flow.conftest import MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.support.flow import Flow
from tests.support.waiting import until

SETTINGS = {
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
@swaps(*(f"jobs.{name}" for name in SETTINGS))
async def test_reload_writes_jobs_settings(flow: Flow, make_daemon: MakeDaemon) -> None:
    """Nothing is written at the start without settings; the reload writes all of them."""
    before = await flow.daemon.fetch("select * from webhookd.settings order by key")
    daemon = await make_daemon(services={"enabled": ["api", "jobs"]}).start()
    await daemon.until(lambda: daemon.get_json("/status")["job_queue"], "seen")
    assert await flow.daemon.fetch("select * from webhookd.settings order by key") == before
    daemon.configure(jobs=SETTINGS)
    assert await daemon.reload()
    await until(flow.daemon, WRITTEN, json.dumps(SETTINGS))
    await daemon.until(lambda: daemon.logged("[jobs] was written to the database"), "logged")
    [written] = daemon.logged("[jobs] was written to the database")
    assert written["max_attempts"] == 7
