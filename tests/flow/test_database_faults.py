"""PostgreSQL killed, stalled and away, under a daemon that takes events and delivers them.

With a durable server of their own. How long healing took is logged (--log-cli-level=info), and not judged.
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

# Leases whose answers were lost are soon taken back.
SHORT = {"timeout_seconds": 1.0, "lease_seconds": 6.0}
IDLE_SECONDS = 4
# Of one service: once it has failed a few times it begins anew every 1.5 s on the average.
MAX_RESTARTS_PER_SECOND = 5
# Coarse, for a slow machine needs more for the same: one that spins has all there is.
MAX_CPU_SHARE = 0.25
# What a dead instance had is taken back.
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
    """Give the one of a server of their own, in place of the shared one's."""
    return breakable_cluster


@pytest.fixture
def breakable(breakable_server: BreakableServer, database: Database) -> Iterator[BreakableServer]:
    """Give the server to a test, and have it up again for the next."""
    assert database.server is breakable_server
    yield breakable_server
    breakable_server.heal()


def restarts_of(daemon: DaemonProcess) -> dict[str, int]:
    """How often each service was begun anew."""
    return {service["name"]: service["restarts"] for service in daemon.get_json("/status")["services"]}


def is_ready(daemon: DaemonProcess) -> bool:
    """What it says of itself."""
    return daemon.get("/readyz")[0] == 200


async def test_a_killed_server_loses_nothing_that_was_acknowledged(
    breakable: BreakableServer, database: Database, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """Killed, stopped at once and killed again: 503 meanwhile, every 202 is delivered, the daemon lives."""
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
            log.info("%s: first delivery %.2f s after the return", end.__name__, time.monotonic() - started)
            await daemon.until(lambda: is_ready(daemon), "ready")
        await publisher.accepted(50)
    superuser = await database.connect("superuser")
    assert await broken_promises(superuser, publisher, receiver) == []
    assert set(health.healthz) == {200}
    assert daemon.process.poll() is None
    assert daemon.metric("webhookd_service_restarts_total") > 0
    assert daemon.faults() == []
    log.info("%d events, turned away %s", len(publisher.told), dict(publisher.turned_away))
    log.info("readyz %s", health.readyz)


async def test_a_stalled_server_is_waited_for(
    breakable: BreakableServer, database: Database, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """Stopped until commands and the heartbeat time out: 503 meanwhile, alive, and then on as before."""
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
        # An attempt to reach the server did not make it look ready in between. It may have been unready for
        # a moment before: a slow answer is as good as none.
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
        "%d events, turned away %s, readyz %s",
        len(publisher.told),
        dict(publisher.turned_away),
        health.readyz,
    )


async def test_a_daemon_without_its_server_is_idle(
    breakable: BreakableServer, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """While the database is away nothing spins; and it delivers after the return."""
    daemon = await make_daemon().start()
    await asyncio.to_thread(breakable.crash)
    await daemon.until(lambda: not is_ready(daemon), "not ready")
    began, restarts, used = time.monotonic(), restarts_of(daemon), processor_seconds(daemon.process.pid)
    await asyncio.sleep(IDLE_SECONDS)
    tries = {name: count - restarts[name] for name, count in restarts_of(daemon).items()}
    used = processor_seconds(daemon.process.pid) - used
    elapsed = time.monotonic() - began
    log.info("%.1f %% of a processor while the database is away, %s", 100 * used / elapsed, tries)
    assert max(tries.values()) < MAX_RESTARTS_PER_SECOND * elapsed, tries
    assert used < MAX_CPU_SHARE * elapsed
    await asyncio.to_thread(breakable.restart)
    async with Publisher([daemon]).publishing():
        await receiver.received(1)


@pytest.mark.parametrize("how", ["crash", "stall"])
async def test_it_ends_in_order_without_the_server(
    how: str, breakable: BreakableServer, database: Database, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """SIGTERM with answers that cannot be reported: exit 0 after the grace, and the next instance heals."""
    daemon = await make_daemon(delivery=HELD, services={"shutdown_grace_seconds": 1}).start()
    publisher = Publisher([daemon])
    async with publisher.publishing():
        await receiver.received(20)
        receiver.hold()
        await receiver.received(5)
    witness = await database.connect("superuser")
    transaction = witness.transaction()
    await transaction.start()
    await witness.execute(HOLD_JOBS)
    await asyncio.to_thread(getattr(breakable, how))
    receiver.release()
    daemon.sigterm()
    assert await daemon.ended() == 0
    await asyncio.to_thread(breakable.heal)
    if how == "stall":
        # A report that the server had before it stalled is not to be done now that it goes on.
        await witness.fetchval(END_BACKENDS)
        await transaction.rollback()
    superuser = await database.connect("superuser")
    await superuser.execute(EXPIRE_LEASES)
    await make_daemon(retry=PATIENT).start()
    assert await broken_promises(superuser, publisher, receiver) == []
    assert await superuser.fetchval("select sum(lease_resets) from webhookd.webhook_delivery_jobs") > 0


@pytest.mark.parametrize("how", ["crash", "stall"])
async def test_without_a_server_it_does_not_start(
    how: str, breakable: BreakableServer, make_daemon: MakeDaemon
) -> None:
    """Gone or silent at the start: exit 69 and one line, for the service manager to start it again."""
    daemon = make_daemon()
    await asyncio.to_thread(getattr(breakable, how))
    daemon.launch()
    assert await daemon.ended() == 69
    [line] = daemon.log_path.read_text().splitlines()
    assert line.startswith("webhookd: database unavailable at 127.0.0.1:")
