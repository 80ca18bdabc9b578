"""`webhookd serve`: errors at startup, the choice of services, and shutdown.

A startup error is an exit code and one line that says what to do.
"""

import signal
import socket

import aiohttp
import pytest

from tests.flow.conftest import HELD, MakeApi, MakeDaemon
from tests.flow.test_lifecycle import COMPLETED, publish_many
from tests.flow.test_scenarios import subscribed
from tests.support.api import Client
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, LARGE, Flow
from tests.support.guards import HOLD_LOADING, HOLDABLE_LOADING
from tests.support.postgres import free_port, readdress
from tests.support.waiting import until
from tests.support.wire import Wire

STAGES = ("routing", "orchestration", "delivery", "reaper", "jobs")
LEASED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'"


async def startup_error(daemon: DaemonProcess, exit_code: int, *options: str) -> str:
    """Start a daemon that must exit with this code, and return its one line of output."""
    daemon.launch(*options)
    assert await daemon.ended() == exit_code, daemon.output_lines()
    [line] = daemon.output_lines()
    assert line.startswith("webhookd: ")
    return line


# The schema.


@pytest.mark.parametrize("login", ["daemon", "migrator"])
async def test_empty_database_is_rejected(
    login: str, empty_database: Database, make_daemon: MakeDaemon
) -> None:
    """The error names the command to run; even a login that could migrate does not without auto_migrate."""
    dsn = empty_database.dsn("migrator" if login == "migrator" else "daemon")
    assert "run `webhookd migrate`" in await startup_error(make_daemon(database={"dsn": dsn}), 1)


async def test_auto_migrate_migrates_an_empty_database(
    empty_database: Database, make_api: MakeApi, endpoint: Endpoint
) -> None:
    """With a login that may migrate; the daemon then serves with the same login."""
    settings = {"dsn": empty_database.dsn("migrator"), "auto_migrate": True}
    api = await make_api(database=settings)
    await api.subscribe(endpoint)
    assert (await api.event()).status == 202
    await until(await empty_database.connect("superuser"), COMPLETED, 1)
    assert api.daemon.metric("webhookd_service_restarts_total") == 0
    api.daemon.stop()


async def test_auto_migrate_fails_without_privileges(
    empty_database: Database, make_daemon: MakeDaemon
) -> None:
    """auto_migrate with the daemon's own login exits with 1 and says that it cannot migrate."""
    daemon = make_daemon(database={"dsn": empty_database.dsn("daemon"), "auto_migrate": True})
    assert "cannot migrate" in await startup_error(daemon, 1)


@pytest.mark.parametrize("auto_migrate", [False, True])
async def test_newer_schema_is_rejected(
    auto_migrate: bool,
    database: Database,
    flow: Flow,
    make_daemon: MakeDaemon,
) -> None:
    """With and without auto_migrate: there are no downgrades."""
    await flow.superuser.execute(
        "insert into webhookd.schema_migrations (version, name, checksum, webhookd_version)"
        " values (9999, 'from a later version', '', '99.0.0')"
    )
    settings = {"dsn": database.dsn("migrator"), "auto_migrate": auto_migrate}
    line = await startup_error(make_daemon(database=settings), 1)
    assert "newer than this webhookd" in line
    assert "Upgrade webhookd" in line


# The database and the port.


async def test_unavailable_database_at_startup(database: Database, make_daemon: MakeDaemon) -> None:
    """A closed port gives exit code 69, so that systemd tries again."""
    host = f"127.0.0.1:{free_port()}"
    line = await startup_error(
        make_daemon(database={"dsn": f"postgresql://a:hunter2@{host}/{database.name}"}), 69
    )
    assert "database unavailable" in line
    assert "hunter2" not in line


async def test_wrong_password(database: Database, make_daemon: MakeDaemon) -> None:
    """The error says that the login was refused and does not contain the password."""
    dsn = readdress(database.dsn("daemon"), database.name, database.login_name("daemon"), "hunter2")
    line = await startup_error(make_daemon(database={"dsn": dsn}), 69)
    assert "refused this login" in line
    assert "hunter2" not in line


async def test_port_in_use(make_daemon: MakeDaemon) -> None:
    """The daemon exits with an error that names the address instead of retrying forever."""
    daemon = make_daemon()
    with socket.create_server(("127.0.0.1", daemon.port)):
        daemon.launch()
        assert await daemon.ended() == 1
        [line] = daemon.output_lines()
        assert f"127.0.0.1:{daemon.port}" in line


# The configuration.

BAD_SETTINGS: dict[str, tuple[dict[str, dict[str, object]], str]] = {
    "unknown key": ({"retry": {"max_attemps": 3}}, "did you mean max_attempts?"),
    "wrong type": ({"retry": {"max_attempts": "three"}}, "retry.max_attempts"),
    "lease and timeout": ({"delivery": {"lease_seconds": 19.9}}, "delivery.lease_seconds"),
    "missing CA file": ({"delivery": {"ca_file": "/nowhere/ca.pem"}}, "delivery.ca_file"),
    "invalid DSN": ({"database": {"dsn": "nonsense"}}, "database.dsn"),
    "public URL": ({"api": {"public_url": "hooks.example.com"}}, "api.public_url"),
    "missing logo": ({"console": {"logo": "/nowhere/logo.png"}}, "console.logo"),
    "invalid port": ({"api": {"listen": "127.0.0.1:0"}}, "api.listen"),
}


@pytest.mark.parametrize("mistake", BAD_SETTINGS)
async def test_invalid_configuration(mistake: str, make_daemon: MakeDaemon) -> None:
    """Exit 78, so that systemd does not try again, and the error names the key."""
    settings, words = BAD_SETTINGS[mistake]
    assert words in await startup_error(make_daemon(**settings), 78)


async def test_missing_configuration_file(make_daemon: MakeDaemon) -> None:
    """A file named with --config must exist."""
    daemon = make_daemon()
    daemon.config_path.unlink()
    assert "No such file" in await startup_error(daemon, 78)


async def test_file_name_with_nul_character(make_daemon: MakeDaemon) -> None:
    """Python raises another exception for it than for a missing file; the exit code is the same."""
    assert "delivery.ca_file" in await startup_error(make_daemon(delivery={"ca_file": "a\0b"}), 78)


# Services.


async def test_services_can_run_in_different_instances(
    make_daemon: MakeDaemon, session: aiohttp.ClientSession, endpoint: Endpoint, flow: Flow
) -> None:
    """An instance with only the API accepts an event; an instance with the other services delivers it."""
    front, back = make_daemon(), make_daemon()
    api = Client(session, await front.start("--services", "api"))
    await api.subscribe(endpoint)
    services = {service["name"] for service in (await api.get("/status")).body["services"]}
    assert services == {"api", "listener", "notifier", "monitor"}
    assert (await api.event()).status == 202
    assert await flow.daemon.fetchval("select count(*) from webhookd.event_routing_queue") == 1
    back.launch("--services", ",".join(STAGES))
    await until(flow.daemon, COMPLETED, 1)
    assert len(endpoint.requests) == 2  # including the verification challenge
    assert back.get("/healthz")[0] == 0
    assert front.metric("webhookd_events_routed_total") == 0
    assert front.metric("webhookd_delivery_attempts_total") == 0


async def test_stages_in_three_processes_wake_each_other(
    make_daemon: MakeDaemon, endpoint: Endpoint, flow: Flow
) -> None:
    """By NOTIFY alone, without polling: more events than a batch, and retries, pass through all three."""
    await subscribed(flow, endpoint)
    endpoint.fail_times(3)
    settings = {
        "services": {"poll_interval_seconds": 600},
        "routing": {"batch_size": 50},
        "orchestration": {"batch_size": 50},
        "retry": {"base_delay_seconds": 0},
    }
    for services in ("api,routing", "api,orchestration,reaper", "api,delivery"):
        await make_daemon(**settings).start("--services", services)
    for count in (1, 300):
        done = await flow.daemon.fetchval("select count(*) from webhookd.events")
        await publish_many(flow, count, [EVENT_TYPE])
        await until(flow.daemon, COMPLETED, done + count)
    assert len(endpoint.requests) == 301 + 3


async def test_services_option_overrides_the_file(make_daemon: MakeDaemon) -> None:
    """A reload of a file with other services does not change the services of --services."""
    daemon = await make_daemon(services={"enabled": ["api", "routing"]}).start("--services", "api")
    daemon.configure(services={"enabled": ["api", "reaper"]})
    assert await daemon.reload()
    assert not daemon.logged("restart webhookd to apply it")
    assert daemon.metric("webhookd_service_up", service="routing") == 0


async def test_unknown_service_is_rejected(make_daemon: MakeDaemon) -> None:
    """The error suggests the service with the most similar name."""
    daemon = make_daemon()
    daemon.launch("--services", "api,routng")
    assert await daemon.ended() == 2
    [line] = daemon.output_lines()
    assert "--services" in line
    assert "did you mean routing?" in line


async def test_empty_list_of_services_is_rejected(make_daemon: MakeDaemon) -> None:
    """An instance without any service would do nothing."""
    daemon = make_daemon()
    daemon.launch("--services", "")
    assert await daemon.ended() == 78


# Shutdown.


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
async def test_shutdown_waits_for_requests_in_flight(
    stop_signal: signal.Signals, flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """After SIGTERM or Ctrl-C: the request finishes and is reported, and no lease is left."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(delivery=HELD).start()
    await flow.publish()
    await gate.opened(1)
    daemon.process.send_signal(stop_signal)
    await daemon.until(lambda: daemon.logged("draining"), "draining")
    assert daemon.process.poll() is None
    gate.let_through(1)
    assert await daemon.ended() == 0
    assert await flow.daemon.fetchval(
        "select array_agg(status) = '{Completed}' from webhookd.webhook_delivery_jobs"
    )
    assert daemon.logged("stopped")


async def test_request_longer_than_the_grace_period_keeps_its_lease(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Exit 0. Whether the request arrived is unknown, so it is sent again after the lease expires."""
    await subscribed(flow, endpoint)
    endpoint.hang()
    daemon = await make_daemon(delivery=HELD, services={"shutdown_grace_seconds": 0.2}).start()
    await flow.publish()
    await endpoint.received(1)
    daemon.sigterm()
    assert await daemon.ended() == 0
    assert await flow.daemon.fetchval(LEASED) == 1
    assert all(line.startswith("{") for line in daemon.output_lines())

    endpoint.answer(200)
    await flow.expire_lease(await flow.daemon.fetchval("select id from webhookd.webhook_delivery_jobs"))
    await make_daemon().start()
    await until(flow.daemon, COMPLETED, 1)
    assert [request.headers["webhook-attempt"] for request in endpoint.requests] == ["1", "1"]
    assert await flow.daemon.fetchval("select lease_resets from webhookd.webhook_delivery_jobs") == 1


async def test_shutdown_between_claim_and_request_leaves_no_lease(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """An attempt that was leased but not started at the signal is sent or released."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon().start()
    await HOLDABLE_LOADING.take_away(flow.superuser)
    transaction = flow.superuser.transaction()
    await transaction.start()
    # A large payload is loaded between lease and request: hold that call here.
    await flow.superuser.execute(HOLD_LOADING)
    await flow.publish(payload=LARGE)
    await until(flow.daemon, f"select ({LEASED}) = 1")
    daemon.sigterm()
    await daemon.until(lambda: daemon.logged("draining"), "draining")
    await transaction.commit()
    assert await daemon.ended() == 0
    assert await flow.daemon.fetchval(LEASED) == 0


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_shutdown_without_the_database(
    how: str, flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon, wire: Wire
) -> None:
    """Cut off or stalled, with an unreported result: exit 0, and the next instance delivers again."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(
        delivery=HELD, database={"dsn": wire.dsn}, services={"shutdown_grace_seconds": 0.5}
    ).start()
    await flow.publish()
    await gate.opened(1)
    getattr(wire, how)()
    gate.let_through(10)
    await daemon.until(lambda: daemon.logged("attempt delivered"), "delivered")
    daemon.sigterm()
    assert await daemon.ended() == 0
    assert all(line.startswith("{") for line in daemon.output_lines())

    await flow.expire_lease(await flow.daemon.fetchval("select id from webhookd.webhook_delivery_jobs"))
    await make_daemon().start()
    await until(flow.daemon, COMPLETED, 1)
    assert len(endpoint.requests) == 2
