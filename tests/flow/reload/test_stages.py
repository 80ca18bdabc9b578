"""Reload of the other sections: routing, orchestration, reaper, services, api, subscriptions, log."""

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.flow.test_lifecycle import COMPLETED, publish_many
from tests.flow.test_scenarios import subscribed
from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until

# Rows without a later change keep the transaction id of their insertion in xmin.
LARGEST_BATCH = "select max(n) from (select count(*) as n from webhookd.{} group by xmin::text) batches"


async def largest_batch(flow: Flow, table: str) -> int:
    """Return the largest number of rows inserted by one transaction and not changed since."""
    size: int = await flow.daemon.fetchval(LARGEST_BATCH.format(table))
    return size


@swaps("routing.batch_size")
async def test_reload_changes_the_batch_size_of_routing(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Six events of one transaction are routed two at a time."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon(services={"enabled": ["api", "routing"]}).start()
    daemon.configure(routing={"batch_size": 2})
    assert await daemon.reload()
    # A query that was running during the reload uses the old size; later queries use the new one.
    await publish_many(flow, 1, [EVENT_TYPE])
    await until(flow.daemon, "select count(*) = 1 from webhookd.webhook_delivery_sagas")
    await publish_many(flow, 6, [EVENT_TYPE])
    await until(flow.daemon, "select count(*) = 7 from webhookd.webhook_delivery_sagas")
    assert await largest_batch(flow, "webhook_delivery_sagas") == 2


@swaps("orchestration.batch_size", "orchestration.subscription_window")
async def test_reload_changes_the_batch_size_and_window_of_orchestration(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Of ten waiting deliveries, three have an attempt with a window of three; then seven, one per batch."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon(
        services={"enabled": ["api", "routing", "orchestration"]}, orchestration={"subscription_window": 3}
    ).start()
    await publish_many(flow, 10, [EVENT_TYPE])
    active = "select count(*) = $1 from webhookd.webhook_delivery_jobs where status = 'Pending'"
    await until(flow.daemon, active, 3)
    # Before the reload: the window is full, so no attempt is added in between.
    before = await flow.daemon.fetchval("select max(id) from webhookd.webhook_delivery_jobs")
    daemon.configure(orchestration={"subscription_window": 7, "batch_size": 1})
    assert await daemon.reload()
    await until(flow.daemon, active, 7)
    new = f"webhook_delivery_jobs where id > {before}"
    assert await largest_batch(flow, new) == 1


@swaps("orchestration.failing_after")
async def test_reload_changes_failing_after(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """Three failures are below the default of ten, but reach a limit of three."""
    await subscribed(flow, endpoint)
    endpoint.answer(500)
    daemon = await make_daemon(retry={"max_attempts": 3}).start()
    failing = "select failing_since is not null from webhookd.endpoint_health"
    await flow.publish()
    await until(flow.daemon, "select count(*) = 1 from webhookd.dead_letters")
    assert not await flow.daemon.fetchval(failing)
    endpoint.answer(200)
    await flow.publish()
    await until(flow.daemon, COMPLETED, 1)
    endpoint.answer(500)
    daemon.configure(orchestration={"failing_after": 3})
    assert await daemon.reload()
    await flow.publish()
    await until(flow.daemon, "select count(*) = 2 from webhookd.dead_letters")
    assert await flow.daemon.fetchval(failing)


@swaps("reaper.max_lease_resets")
async def test_reload_changes_max_lease_resets(flow: Flow, make_daemon: MakeDaemon) -> None:
    """The first expired lease is reset; after the reload an expired lease fails the attempt."""
    daemon = await make_daemon(services={"enabled": ["api", "reaper"]}).start()
    await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.start()
    job = "select status = $1 and lease_resets = 1 from webhookd.webhook_delivery_jobs where id = $2"
    job_id = await claim_and_expire(flow)
    await until(flow.daemon, job, "Pending", job_id)
    daemon.configure(reaper={"max_lease_resets": 0})
    assert await daemon.reload()
    # A query that was running during the reload uses the old limit: give it another attempt to find.
    await flow.publish()
    await flow.route()
    await flow.start()
    [other] = {lease.job_id for lease in await flow.claim()} - {job_id}
    await flow.expire_lease(other)
    await until(
        flow.daemon, "select status <> 'Leased' from webhookd.webhook_delivery_jobs where id = $1", other
    )
    await flow.expire_lease(job_id)
    await until(flow.daemon, job, "Failed", job_id)


async def claim_and_expire(flow: Flow) -> int:
    """Claim an attempt, expire its lease, and return its id."""
    [lease] = await flow.claim()
    await flow.expire_lease(lease.job_id)
    return lease.job_id


@swaps("reaper.interval_seconds")
async def test_reload_changes_the_interval_of_the_reaper(flow: Flow, make_daemon: MakeDaemon) -> None:
    """From an hour to 0.1 s, without waiting for the end of the hour."""
    daemon = await make_daemon(
        services={"enabled": ["api", "reaper"]}, reaper={"interval_seconds": 3600}
    ).start()
    await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.start()
    await claim_and_expire(flow)
    daemon.configure(reaper={"interval_seconds": 0.1})
    assert await daemon.reload()
    await until(flow.daemon, "select status = 'Pending' from webhookd.webhook_delivery_jobs")


@swaps("services.poll_interval_seconds")
async def test_reload_changes_the_poll_interval(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """From an hour to 0.1 s: a retry that has become due is found."""
    await subscribed(flow, endpoint)
    endpoint.fail_times(1)
    daemon = await make_daemon(services={"poll_interval_seconds": 3600}).start()
    await flow.publish()
    await until(
        flow.daemon,
        "select status = 'PendingRetry' from webhookd.webhook_delivery_sagas where attempt_count = 1",
    )
    daemon.configure(services={"poll_interval_seconds": 0.1})
    assert await daemon.reload()
    await until(flow.daemon, COMPLETED, 1)


@swaps("services.shutdown_grace_seconds")
async def test_reload_changes_the_shutdown_grace_period(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """A hanging request no longer delays the shutdown by a day."""
    await subscribed(flow, endpoint)
    endpoint.hang()
    daemon = await make_daemon(
        services={"shutdown_grace_seconds": 86_400},
        delivery={"timeout_seconds": 3600, "lease_seconds": 7200},
    ).start()
    await flow.publish()
    await endpoint.received(1)
    daemon.configure(services={"shutdown_grace_seconds": 0.1})
    assert await daemon.reload()
    daemon.sigterm()
    assert await daemon.ended() == 0


@swaps("subscriptions.verification_methods")
async def test_reload_allows_another_verification_method(make_api: MakeApi, endpoint: Endpoint) -> None:
    """A ping is rejected before the reload, and verifies after it."""
    api = await make_api()
    await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url("/hook")})
    ping = {"method": "ping"}
    assert (await api.post("/v1/subscriptions/1/verify", ping)).status == 422
    api.daemon.configure(subscriptions={"verification_methods": ["challenge", "ping"]})
    assert await api.daemon.reload()
    assert (await api.post("/v1/subscriptions/1/verify", ping)).status == 200


@swaps("api.max_payload_bytes", "subscriptions.secret_overlap_seconds")
async def test_reload_changes_payload_limit_and_secret_overlap(make_api: MakeApi, endpoint: Endpoint) -> None:
    """A body that was too large is accepted; the previous secret of the next rotation expires sooner."""
    api = await make_api(api={"max_payload_bytes": 1024})
    made = await api.subscribe(endpoint)
    rotate = f"/v1/subscriptions/{made['id']}/rotate-secret"
    assert (await api.event(payload="x" * 2000)).problem == (413, "payload_too_large")
    first = await api.post(rotate)
    api.daemon.configure(api={"max_payload_bytes": 4096}, subscriptions={"secret_overlap_seconds": 60})
    assert await api.daemon.reload()
    assert (await api.event(payload="x" * 2000)).status == 202
    second = await api.post(rotate)
    assert second.body["previous_valid_until"] < first.body["previous_valid_until"]


@swaps("log.level", "log.format")
async def test_reload_changes_log_level_and_format(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Each delivery is logged at level debug and not at info; first as JSON, then as text."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon(log={"level": "debug"}).start()

    async def lines_of(delivery: int) -> list[str]:
        """Return the log lines of a new delivery."""
        lines = len(daemon.output_lines())
        await flow.publish()
        await until(flow.daemon, COMPLETED, delivery)
        return [line for line in daemon.output_lines()[lines:] if "attempt delivered" in line]

    assert len(await lines_of(1)) == 1
    await reload_log(daemon, level="info")
    assert await lines_of(2) == []
    await reload_log(daemon, level="debug")
    [as_json] = await lines_of(3)
    await reload_log(daemon, format="text")
    [as_text] = await lines_of(4)
    assert as_json.startswith("{")
    assert not as_text.startswith("{")


async def reload_log(daemon: DaemonProcess, **settings: str) -> None:
    """Reload with other log settings."""
    daemon.configure(log=settings)
    assert await daemon.reload()
