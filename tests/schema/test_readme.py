"""Runs the SQL examples of schema/README.md with psql."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

from tests.support.database import Database
from webhookd.embedded.installation import wheel_installations

ROOT = Path(__file__).resolve().parents[2]


def documented(path: str, heading: str) -> str:
    """Return the first SQL block after a heading."""
    text = (ROOT / path).read_text("utf-8")
    match = re.search(r"```sql\n(.*?)```", text[text.index(heading) :], re.DOTALL)
    assert match is not None
    return match[1]


async def follow(database: Database, heading: str) -> None:
    """Run a block with psql, as the daemon's login."""
    # The machine's psql, or that of the embedded server's package.
    psql = shutil.which("psql") or next(wheel_installations()).program("psql")
    done = await asyncio.to_thread(
        subprocess.run,
        [psql, "--no-psqlrc", "--set=ON_ERROR_STOP=1", database.dsn("daemon")],
        input=documented("schema/README.md", heading),
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


async def test_one_event_and_one_job_by_hand(database: Database) -> None:
    """The examples produce and requeue a dead letter, for a delivery, which then succeeds, and for a job."""
    await follow(database, "### One event by hand")
    await follow(database, "### One job by hand")
    daemon = await database.connect("daemon")
    states = await daemon.fetch("select status from webhookd.webhook_delivery_sagas order by id")
    assert [row[0] for row in states] == ["DeadLettered", "Completed"]
    states = await daemon.fetch("select status from webhookd.job_queue order by enqueued_at")
    assert [row[0] for row in states] == ["cancelled", "queued"]
