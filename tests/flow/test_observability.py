"""What an operator can observe: /readyz, /status, /metrics and the log."""

import asyncio
from typing import Any

from tests.flow.conftest import HELD, MakeDaemon
from tests.flow.test_lifecycle import COMPLETED
from tests.flow.test_scenarios import subscribed
from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until
from webhookd.deliveries import ingest, subscriptions


def status_of(daemon: DaemonProcess) -> Any:
    """Return the document of /status."""
    return daemon.get_json("/status")


def backlog_of(daemon: DaemonProcess) -> dict[str, int]:
    """Return the stages with waiting work, from /status."""
    backlog = status_of(daemon)["backlog"]
    stages = backlog["stages"] if backlog else []
    return {stage["stage"]: stage["waiting"] for stage in stages if stage["waiting"]}


async def test_backlog_is_reported(flow: Flow, make_daemon: MakeDaemon) -> None:
    """Without a router, events wait for routing: shown in the gauges and in /status, with their age."""
    await flow.publish()
    await flow.publish()
    daemon = await make_daemon(services={"enabled": ["api"]}).start()
    await daemon.until(lambda: daemon.metric("webhookd_backlog", stage="routing") == 2, "seen")
    # The monitor discards a reading that took too long, until the next one.
    await daemon.until(lambda: backlog_of(daemon) == {"routing": 2}, "seen in /status")
    age = "webhookd_backlog_oldest_age_seconds"
    await daemon.until(lambda: daemon.metric(age, stage="routing") > 0, "old")
    assert daemon.metric(age, stage="results") == 0


async def test_failing_endpoint_is_reported(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """It is listed with its error until it responds again."""
    created = await subscribed(flow, endpoint)
    endpoint.answer(503)
    daemon = await make_daemon(orchestration={"failing_after": 2}, retry={"max_attempts": 1000}).start()
    await flow.publish()
    await daemon.until(lambda: status_of(daemon)["failing_endpoints"], "failing")
    [failing] = status_of(daemon)["failing_endpoints"]
    assert failing["subscription_id"] == created.subscription_id
    assert failing["last_error_code"] == "HTTP_503"
    assert daemon.metric("webhookd_delivery_attempts_total", outcome="HTTP_5xx") >= 2
    endpoint.answer(200)
    await daemon.until(lambda: status_of(daemon)["failing_endpoints"] == [], "answering")
    assert daemon.metric("webhookd_delivery_attempts_total", outcome="delivered") == 1


async def test_dead_letter_is_logged_with_its_correlation_id(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The correlation id is in the endpoint's header and in the log lines about the results."""
    await subscribed(flow, endpoint)
    endpoint.answer(500)
    daemon = await make_daemon(retry={"max_attempts": 1}).start()
    [accepted] = await ingest.publish(flow.daemon, [ingest.NewEvent(EVENT_TYPE, "{}", None, "trace-7")])
    await daemon.until(lambda: daemon.logged("dead-lettered"), "dead-lettered")
    await daemon.until(lambda: status_of(daemon)["dead_letters_of_a_day"] == 1, "counted")
    [attempt], [letter] = daemon.logged("attempt failed"), daemon.logged("dead-lettered")
    for line in (attempt, letter):
        assert (line["event_id"], line["correlation_id"]) == (accepted.id, "trace-7")
        assert line["error_code"] == "HTTP_500"
        assert {"saga_id", "job_id", "subscription_id"} <= set(line)
    assert {"worker_id", "lease_expiration", "duration_ms"} <= set(attempt)
    assert "buried_as" in letter
    assert endpoint.requests[0].headers["webhook-correlation-id"] == "trace-7"


async def test_requests_in_flight_are_reported(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """In flight while they run; then their verdicts and durations."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(delivery=HELD).start()
    for _ in range(3):
        await flow.publish()
    await daemon.until(lambda: daemon.metric("webhookd_deliveries_in_flight") == 3, "in flight")
    assert daemon.metric("webhookd_delivery_duration_seconds_count") == 0
    gate.let_through(3)
    await until(flow.daemon, COMPLETED, 3)
    await daemon.until(
        lambda: daemon.metric("webhookd_delivery_reports_total", verdict="accepted") == 3, "done"
    )
    assert daemon.metric("webhookd_delivery_duration_seconds_count") == 3
    assert daemon.metric("webhookd_deliveries_in_flight") == 0


async def test_retry_is_logged_with_its_correlation_id(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """A trace shows why a delivery took long, not only that it became a dead letter."""
    await subscribed(flow, endpoint)
    endpoint.fail_times(1)
    daemon = await make_daemon().start()
    await ingest.publish(flow.daemon, [ingest.NewEvent(EVENT_TYPE, "{}", None, "trace-8")])
    await daemon.until(lambda: daemon.logged("will be retried"), "retried")
    [line] = daemon.logged("will be retried")
    assert (line["correlation_id"], line["error_code"]) == ("trace-8", "HTTP_503")


async def test_draining_instance_is_alive_and_not_ready(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Load balancers stop sending requests while its last delivery finishes."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(delivery=HELD, services={"shutdown_grace_seconds": 600}).start()
    await flow.publish()
    await gate.opened(1)
    daemon.sigterm()
    await daemon.until(lambda: daemon.logged("draining"), "draining")
    assert (daemon.get("/readyz")[0], daemon.get("/healthz")[0]) == (503, 200)
    assert status_of(daemon)["draining"] is True
    gate.let_through(1)
    assert await daemon.ended() == 0
    assert await flow.daemon.fetchval("select status from webhookd.webhook_delivery_jobs") == "Completed"


async def test_health_can_have_its_own_address(flow: Flow, make_daemon: MakeDaemon) -> None:
    """An instance without the API serves only health and status."""
    daemon = make_daemon(services={"enabled": ["routing"]})
    daemon.configure(api={"health_listen": f"127.0.0.1:{daemon.port}"})
    await daemon.start()
    assert daemon.get("/healthz")[0] == 200
    assert daemon.get("/v1/events")[0] == 404
    assert [service["name"] for service in status_of(daemon)["services"]] == [
        "listener",
        "notifier",
        "monitor",
        "health",
        "routing",
    ]
    await flow.publish()
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")


async def test_daemon_does_not_deliver_to_itself(flow: Flow, make_daemon: MakeDaemon) -> None:
    """Its own address is blocked before a connection is opened, whatever networks are allowed."""
    daemon = await make_daemon(retry={"max_attempts": 1}).start()
    created = await subscriptions.create(
        flow.daemon, EVENT_TYPE, f"https://127.0.0.1:{daemon.port}/v1/events"
    )
    await flow.verify(created.subscription_id)
    await flow.publish()
    await until(flow.daemon, "select exists (select from webhookd.dead_letters)")
    assert (
        await flow.daemon.fetchval("select final_error_code from webhookd.dead_letters") == "ADDRESS_BLOCKED"
    )
    assert daemon.metric("webhookd_dials_total") == 0
    assert daemon.metric("webhookd_dials_blocked_total") == 1


async def test_unstorable_report_delays_no_other(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """A report that the database rejects is logged and counted, and the others are stored."""
    await subscribed(flow, endpoint)
    unlucky = await flow.publish()
    await flow.superuser.execute(
        f"""
        create function public.refuse() returns trigger language plpgsql as $$
        begin
            if new.finished_at is not null and exists (select from webhookd.webhook_delivery_sagas s
                                                       where s.id = new.saga_id and s.event_id = {unlucky})
            then
                raise exception 'no';
            end if;
            return new;
        end
        $$;
        create trigger a_refusal before update on webhookd.webhook_delivery_jobs
            for each row execute function public.refuse();
        """
    )
    daemon = await make_daemon(delivery=HELD).start()
    for _ in range(20):
        await flow.publish()
    await until(flow.daemon, COMPLETED, 20)
    others = 20
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        # The report may come after all of these. Alone it is retried: it is recognised only among others.
        while not daemon.logged("cannot be stored"):
            await flow.publish()
            others += 1
            await until(flow.daemon, COMPLETED, others)
    assert daemon.metric("webhookd_delivery_reports_total", verdict="unstorable") == 1
    [line] = daemon.logged("cannot be stored")
    assert line["event_id"] == unlucky


async def test_claim_during_sigterm_is_not_lost(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The attempts of the last claim are sent and reported: no lease is left behind."""
    await subscribed(flow, endpoint)
    await flow.publish()
    await flow.route()
    daemon = await make_daemon(services={"enabled": ["api", "delivery"]}).start()
    async with flow.superuser.transaction():
        await flow.superuser.execute("lock table webhookd.webhook_delivery_jobs in access exclusive mode")
        await flow.superuser.execute(
            "select webhookd.start_due_sagas(array_agg(id), array[1], array[null::bigint],"
            " array[null::bigint], 1, 1) from webhookd.subscriptions"
        )
        await until(
            flow.daemon,
            "select exists (select from pg_stat_activity where query like '%claim_jobs%'"
            " and $1 = any(pg_blocking_pids(pid)))",
            flow.superuser.get_server_pid(),
        )
        daemon.sigterm()
        await daemon.until(lambda: daemon.logged("draining"), "draining")
    assert await daemon.ended() == 0
    assert len(endpoint.requests) == 1
    assert await flow.daemon.fetchval("select status from webhookd.webhook_delivery_jobs") == "Completed"


async def test_api_responses_are_counted(make_daemon: MakeDaemon) -> None:
    """By route pattern and status class; an unknown path creates no series of its own."""
    daemon = await make_daemon().start()
    daemon.post_json("/v1/events", {"event_type": EVENT_TYPE, "payload": {}})
    daemon.post_json("/v1/events", {})
    daemon.get("/v1/events/1")
    daemon.get("/v1/events/2")
    daemon.get("/no/such/path")

    def answers(route: str, status: str) -> float:
        return daemon.metric("webhookd_api_responses_total", route=route, status=status)

    assert (answers("POST /v1/events", "2xx"), answers("POST /v1/events", "4xx")) == (1, 1)
    assert (answers("GET /v1/events/{id}", "2xx"), answers("GET /v1/events/{id}", "4xx")) == (1, 1)
    assert answers("none", "4xx") == 1


async def test_settings_that_need_a_restart_are_counted(make_daemon: MakeDaemon) -> None:
    """The gauge counts them; other settings take effect with the reload."""
    daemon = await make_daemon(database={"pool_size": 3}, delivery={"concurrency": 5}).start()
    assert daemon.metric("webhookd_config_restart_needed") == 0
    daemon.configure(database={"pool_size": 4}, delivery={"concurrency": 6})
    assert await daemon.reload()
    assert daemon.metric("webhookd_config_restart_needed") == 1
    await daemon.until(lambda: daemon.metric("webhookd_deliveries_in_flight_limit") == 6, "swapped")
    daemon.configure(database={"pool_size": 3})
    assert await daemon.reload()
    assert daemon.metric("webhookd_config_restart_needed") == 0
