"""PostgreSQL is killed, stalled or unavailable while a daemon accepts and delivers events.

These tests use their own durable server. Recovery times are logged (--log-cli-level=info) but not asserted.
"""

import asyncio
import logging
import time
from collections.abc import Iterator

import pytest

from tests.flow.conftest import HELD, PATIENT, MakeDaemon
from tests.support.breakable import BreakableServer
from tests.support.daemon import DaemonProcess
from tests.support.database import Cluster, Database
from tests.support.processes import processor_seconds
from tests.support.publisher import APPLICATIONS, Publisher
from tests.support.traffic import HealthWatch, Receiver, broken_promises

log = logging.getLogger(__name__)

# Leases whose reports were lost expire soon.
SHORT = {"timeout_seconds": 1.0, "lease_seconds": 6.0}
IDLE_SECONDS = 4
# Per service: after a few failures it restarts every 1.5 s on average.
MAX_RESTARTS_PER_SECOND = 5
# Coarse, because a slow machine needs more time for the same work; a busy loop would use 100 %.
MAX_CPU_SHARE = 0.25
# Lets the next instance reset the leases of a dead one.
EXPIRE_LEASES = """
    update webhookd.webhook_delivery_jobs set lease_until = now() - interval '1 s' where status = 'Leased'
"""
HOLD_JOBS = "lock table webhookd.webhook_delivery_jobs in access exclusive mode"
END_BACKENDS = """
    select bool_and(pg_terminate_backend(pid, 60000)) from pg_stat_activity
    where datname = current_database() and application_name = 'webhookd'
"""


@pytest.fixture(scope="module")
def cluster(breakable_cluster: Cluster) -> Cluster:
    """Use the cluster of these tests' own server instead of the shared cluster."""
    return breakable_cluster


@pytest.fixture
def breakable(breakable_server: BreakableServer, database: Database) -> Iterator[BreakableServer]:
    """Return the server, and make it run again after the test."""
    assert database.server is breakable_server
    yield breakable_server
    breakable_server.heal()


def restarts_of(daemon: DaemonProcess) -> dict[str, int]:
    """Return the number of restarts of each service."""
    return {service["name"]: service["restarts"] for service in daemon.get_json("/status")["services"]}


def is_ready(daemon: DaemonProcess) -> bool:
    """Return whether /readyz answers 200."""
    return daemon.get("/readyz")[0] == 200


async def test_killed_database_server_loses_no_accepted_event(
    breakable: BreakableServer, database: Database, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """Crash and immediate shutdown: 503 meanwhile, every 202 is delivered, the daemon keeps running."""
    daemon = await make_daemon(delivery=SHORT, retry=PATIENT).start()
    publisher, health = Publisher([daemon]), HealthWatch(daemon)
    async with health.watching(), publisher.publishing():
        for end in (breakable.crash, breakable.stop_at_once):
            await publisher.accepted(100)
            await receiver.received(50)
            await asyncio.to_thread(end)
            await publisher.refused(APPLICATIONS)
            await daemon.until(lambda: not is_ready(daemon), "not ready")
            await asyncio.to_thread(breakable.restart)
            started = time.monotonic()
            await receiver.received(1)
            log.info("%s: first delivery %.2f s after the restart", end.__name__, time.monotonic() - started)
            await daemon.until(lambda: is_ready(daemon), "ready")
        await publisher.accepted(50)
    superuser = await database.connect("superuser")
    assert await broken_promises(superuser, publisher, receiver) == []
    assert set(health.healthz) == {200}
    assert daemon.process.poll() is None
    assert daemon.metric("webhookd_service_restarts_total") > 0
    assert daemon.faults() == []
    log.info("%d events, rejections %s", len(publisher.accepted_events), dict(publisher.rejections))
    log.info("readyz %s", health.readyz)


async def test_daemon_waits_for_a_stalled_database_server(
    breakable: BreakableServer, database: Database, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """Stalled until statements and the heartbeat time out: 503 meanwhile, then it continues."""
    daemon = await make_daemon(delivery=SHORT, retry=PATIENT).start()
    publisher, health = Publisher([daemon]), HealthWatch(daemon)
    async with health.watching(), publisher.publishing():
        await publisher.accepted(50)
        await receiver.received(50)
        await asyncio.to_thread(breakable.stall)
        changes = len(health.readyz)
        await publisher.refused(APPLICATIONS)
        for service in ("listener", "routing", "orchestration", "delivery"):
            await daemon.until(
                lambda name=service: daemon.logged(f"{name} is waiting for the database"), service
            )
        await daemon.until(lambda: not is_ready(daemon), "not ready")
        # A connection attempt must not make it look ready in between. It may have been unready for a moment
        # before, because a slow answer counts as none.
        assert health.readyz[changes:] in ([503], [200, 503], [])
        await asyncio.to_thread(breakable.resume)
        started = time.monotonic()
        await receiver.received(1)
        log.info("stall: first delivery %.2f s after its end", time.monotonic() - started)
        await publisher.accepted(50)
        await daemon.until(lambda: is_ready(daemon), "ready")
    superuser = await database.connect("superuser")
    assert await broken_promises(superuser, publisher, receiver) == []
    assert set(health.healthz) == {200}
    assert daemon.faults() == []
    log.info(
        "%d events, rejections %s, readyz %s",
        len(publisher.accepted_events),
        dict(publisher.rejections),
        health.readyz,
    )


async def test_daemon_is_idle_while_the_database_is_down(
    breakable: BreakableServer, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """It uses little CPU and few restarts while the database is down, and delivers afterwards."""
    daemon = await make_daemon().start()
    await asyncio.to_thread(breakable.crash)
    await daemon.until(lambda: not is_ready(daemon), "not ready")
    began, restarts, used = time.monotonic(), restarts_of(daemon), processor_seconds(daemon.process.pid)
    await asyncio.sleep(IDLE_SECONDS)
    restarted = {name: count - restarts[name] for name, count in restarts_of(daemon).items()}
    used = processor_seconds(daemon.process.pid) - used
    elapsed = time.monotonic() - began
    log.info("%.1f %% of a processor while the database is down, %s", 100 * used / elapsed, restarted)
    assert max(restarted.values()) < MAX_RESTARTS_PER_SECOND * elapsed, restarted
    assert used < MAX_CPU_SHARE * elapsed
    await asyncio.to_thread(breakable.restart)
    async with Publisher([daemon]).publishing():
        await receiver.received(1)


@pytest.mark.parametrize("how", ["crash", "stall"])
async def test_sigterm_without_the_database_exits_cleanly(
    how: str, breakable: BreakableServer, database: Database, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """Results that cannot be reported: exit 0 after the grace period, and the next instance delivers."""
    daemon = await make_daemon(delivery=HELD, services={"shutdown_grace_seconds": 1}).start()
    publisher = Publisher([daemon])
    async with publisher.publishing():
        await receiver.received(20)
        receiver.hold()
        await receiver.received(5)
    blocker = await database.connect("superuser")
    transaction = blocker.transaction()
    await transaction.start()
    await blocker.execute(HOLD_JOBS)
    await asyncio.to_thread(getattr(breakable, how))
    receiver.release()
    daemon.sigterm()
    assert await daemon.ended() == 0
    await asyncio.to_thread(breakable.heal)
    if how == "stall":
        # A report that reached the server before it stalled must not be executed after it resumes.
        await blocker.fetchval(END_BACKENDS)
        await transaction.rollback()
    superuser = await database.connect("superuser")
    await superuser.execute(EXPIRE_LEASES)
    await make_daemon(retry=PATIENT).start()
    assert await broken_promises(superuser, publisher, receiver) == []
    assert await superuser.fetchval("select sum(lease_resets) from webhookd.webhook_delivery_jobs") > 0


@pytest.mark.parametrize("how", ["crash", "stall"])
async def test_start_fails_without_the_database(
    how: str, breakable: BreakableServer, make_daemon: MakeDaemon
) -> None:
    """Down or stalled: exit 69 and one line, so that the service manager starts it again."""
    daemon = make_daemon()
    await asyncio.to_thread(getattr(breakable, how))
    daemon.launch()
    assert await daemon.ended() == 69
    [line] = daemon.log_path.read_text().splitlines()
    assert line.startswith("webhookd: database unavailable at 127.0.0.1:")


async def test_overview_answers_without_a_database(
    make_daemon: MakeDaemon, breakable: BreakableServer
) -> None:
    """The page shows this instance, and says of the rest that the database does not answer."""
    daemon = await make_daemon().start()
    # The first page of an instance reads the key of its cookies.
    assert daemon.get("/")[0] == 200
    await asyncio.to_thread(breakable.crash)
    await daemon.until(lambda: not is_ready(daemon), "not ready")
    status, body = daemon.get("/")
    assert status == 200
    assert b"Unknown: the database does not answer." in body
    assert b"Not ready" in body
    await asyncio.to_thread(breakable.restart)
    await daemon.until(lambda: is_ready(daemon), "ready")
