"""Instances are killed and connections are cut while PostgreSQL and the other instances keep running.

Recovery times are logged (--log-cli-level=info) but not asserted.
"""

import asyncio
import logging
import time
from collections import Counter

from tests.flow.conftest import PATIENT, MakeDaemon
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.publisher import Publisher
from tests.support.traffic import ALL_DELIVERED, HealthWatch, Receiver, broken_promises
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS, until, until_true
from webhookd.wakeups import FOLLOW_UP_SECONDS

log = logging.getLogger(__name__)

SHORT = {"timeout_seconds": 2.0, "lease_seconds": 7.0}
# Held requests do not time out; a lease granted while its process was dying still expires soon enough.
LONG = {"timeout_seconds": 60.0, "lease_seconds": 65.0, "subscription_concurrency": 16}
EXPIRE_LEASES_OF_PROCESS = """
    update webhookd.webhook_delivery_jobs set lease_until = now() - interval '1 s'
    where status = 'Leased' and split_part(worker_id, ':', 2) = $1
"""
EVENTS_OF_PROCESS = """
    select 'evt_' || s.event_id from webhookd.webhook_delivery_jobs j
    join webhookd.webhook_delivery_sagas s on s.id = j.saga_id
    where j.status = 'Leased' and split_part(j.worker_id, ':', 2) = $1
"""
RESETS = "select sum(lease_resets) from webhookd.webhook_delivery_jobs"
BACKENDS = (
    "select pid from pg_stat_activity where datname = current_database() and application_name = 'webhookd'"
)
# After its first heartbeat, the listener's last statement is always a heartbeat.
LISTENERS = f"{BACKENDS} and query like '%pg_listening_channels%'"


async def test_remaining_instances_deliver_for_killed_instances(
    flow: Flow, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """Kill -9 with and without requests in flight: no event is lost."""
    instances = [await make_daemon(delivery=LONG, retry=PATIENT).start() for _ in range(3)]
    publisher = Publisher(instances)

    async def kill(doomed: DaemonProcess) -> None:
        doomed.kill()
        await flow.superuser.execute(EXPIRE_LEASES_OF_PROCESS, str(doomed.process.pid))

    async def unanswered_events(doomed: DaemonProcess) -> set[str]:
        """Return the events that it has sent and whose response it has not received."""
        leased = await flow.superuser.fetch(EVENTS_OF_PROCESS, str(doomed.process.pid))
        unanswered = {
            receipt.request.headers["webhook-id"]
            for receipt in receiver.receipts
            if receipt.response_status is None
        }
        return unanswered & {event for [event] in leased}

    async def kill_during_requests() -> tuple[float, set[str]]:
        receiver.hold()
        doomed = publisher.daemons[0]
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            while len(held := await unanswered_events(doomed)) < 5:  # noqa: ASYNC110  there is no signal to wait for
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        await kill(doomed)
        killed_at = time.time()
        receiver.release()
        publisher.daemons.remove(doomed)
        return killed_at, held

    async with publisher.publishing():
        await receiver.received(50)
        killed_at, lost = await kill_during_requests()
        for _ in range(3):
            successor = await make_daemon(delivery=LONG, retry=PATIENT).start()
            await publisher.accepted(20)
            await receiver.received(20)
            publisher.daemons.append(successor)
            await kill(publisher.daemons.pop(0))
        # Only the remaining instances can reset these leases, so their metrics must count the resets.
        await kill_during_requests()
    assert await broken_promises(flow.superuser, publisher, receiver) == []
    resets = await flow.superuser.fetchval(RESETS)
    assert resets >= 10
    assert sum(daemon.metric("webhookd_lease_resets_total") for daemon in publisher.daemons) >= 5
    repeated = second_receipts(receiver)
    assert lost <= repeated.keys()
    recovery = [repeated[event] - killed_at for event in lost]
    assert all(instance.faults() == [] for instance in instances)
    log.info(
        "%d events, %d leases reset, %d sent twice", len(publisher.accepted_events), resets, len(repeated)
    )
    log.info("%d leases lost, recovered after %.2f to %.2f s", len(lost), min(recovery), max(recovery))


def second_receipts(receiver: Receiver) -> dict[str, float]:
    """Return the time of the second request of each event that was sent again."""
    seen: Counter[str] = Counter()
    again = {}
    for receipt in receiver.receipts:
        event = receipt.request.headers["webhook-id"]
        seen[event] += 1
        if seen[event] == 2:
            again[event] = receipt.request.received_at
    return again


async def test_delivery_continues_after_reports_failed_past_their_leases(
    flow: Flow, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """A worker may claim an attempt again while it still has to report the first result of that attempt."""
    daemon = await make_daemon(delivery=SHORT, retry=PATIENT).start()
    publisher = Publisher([daemon])
    reporting = "execute on function webhookd.complete_deliveries, webhookd.report_results"
    async with publisher.publishing():
        await receiver.received(20)
        await flow.superuser.execute(f"revoke {reporting} from webhookd_app")
        await until_true(lambda: len(second_receipts(receiver)) >= 20)
        await flow.superuser.execute(f"grant {reporting} to webhookd_app")
    assert await broken_promises(flow.superuser, publisher, receiver) == []
    assert daemon.metric("webhookd_delivery_reports_total", verdict="accepted") >= len(
        publisher.accepted_events
    )
    assert daemon.metric("webhookd_lease_resets_total", status="Pending") >= 20


async def test_listener_reconnects_after_its_connection_is_cut(
    flow: Flow, database: Database, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """Without polling, events published while no listener was connected are found after it reconnects."""
    daemon = await make_daemon(services={"poll_interval_seconds": 600}).start()
    publisher = Publisher([])

    async def publish() -> None:
        # A new session for each event: publish() sends at most one NOTIFY per session every 50 ms.
        application = await database.connect("application")
        key, payload = f"order-{len(publisher.accepted_events)}", "{ }"
        statement = "select webhookd.publish($1, $2, $3)"
        event_id = await application.fetchval(statement, EVENT_TYPE, payload, key)
        publisher.accepted_events[key] = (event_id, payload)

    async def delivered() -> None:
        await until(flow.superuser, ALL_DELIVERED)

    await publish()
    await delivered()
    listener = 0
    for _ in range(2):
        await until(flow.superuser, f"select exists ({LISTENERS} and pid <> $1)", listener)
        listener = await flow.superuser.fetchval(LISTENERS)
        await publish()  # found by NOTIFY, because no stage polls
        await delivered()
        # Otherwise the follow-up checks of this NOTIFY would find the next event.
        await asyncio.sleep(2 * FOLLOW_UP_SECONDS)
        await flow.superuser.execute("select pg_terminate_backend($1, 5000)", listener)
        await publish()  # no listener is connected
        await delivered()
    assert await broken_promises(flow.superuser, publisher, receiver) == []
    # On a busy machine, a late follow-up check of the NOTIFY can find the event before the listener restarts.
    await daemon.until(lambda: daemon.metric("webhookd_service_restarts_total") >= 2, "restarted")
    assert daemon.faults() == []


async def test_terminated_connections_are_replaced(
    flow: Flow, receiver: Receiver, make_daemon: MakeDaemon
) -> None:
    """Every connection of the instance is terminated in turn, in four rounds: no event is lost."""
    daemon = await make_daemon(delivery=SHORT, retry=PATIENT).start()
    publisher, health = Publisher([daemon]), HealthWatch(daemon)
    cut = 0
    async with health.watching(), publisher.publishing():
        await receiver.received(20)
        for _ in range(4):
            for row in await flow.superuser.fetch(BACKENDS):
                cut += await flow.superuser.fetchval("select pg_terminate_backend($1)::integer", row["pid"])
                await publisher.accepted(2)
                await receiver.received(2)
    assert await broken_promises(flow.superuser, publisher, receiver) == []
    assert set(health.healthz) == {200}
    restarts = daemon.metric("webhookd_service_restarts_total")
    assert restarts > 0
    assert daemon.faults() == []
    resets = await flow.superuser.fetchval(RESETS)
    log.info("%d connections cut, %d restarts, %d leases reset", cut, restarts, resets)
    log.info("%d events, rejections %s", len(publisher.accepted_events), dict(publisher.rejections))
