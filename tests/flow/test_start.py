"""`webhookd serve` from its start to its end: what it refuses, which services it runs, how it stops.

A refusal is an exit code and one line that says what to do.
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


async def refused(daemon: DaemonProcess, exit_code: int, *options: str) -> str:
    """The one line of a start that comes to nothing."""
    daemon.launch(*options)
    assert await daemon.ended() == exit_code, daemon.said()
    [line] = daemon.said()
    assert line.startswith("webhookd: ")
    return line


# The schema.


@pytest.mark.parametrize("login", ["daemon", "migrator"])
async def test_an_empty_database_is_refused(
    login: str, empty_database: Database, make_daemon: MakeDaemon
) -> None:
    """With the command to run; by whoever, for migrating was not asked for."""
    dsn = empty_database.dsn("migrator" if login == "migrator" else "daemon")
    assert "run `webhookd migrate`" in await refused(make_daemon(database={"dsn": dsn}), 1)


async def test_an_empty_database_is_migrated_where_that_is_allowed(
    empty_database: Database, make_api: MakeApi, endpoint: Endpoint
) -> None:
    """By a login that may: then it serves, with that login, to the delivery."""
    settings = {"dsn": empty_database.dsn("migrator"), "auto_migrate": True}
    api = await make_api(database=settings)
    await api.subscribe(endpoint)
    assert (await api.event()).status == 202
    await until(await empty_database.connect("superuser"), COMPLETED, 1)
    assert api.daemon.metric("webhookd_service_restarts_total") == 0
    api.daemon.stop()


async def test_a_login_that_may_not_migrate_is_told_so(
    empty_database: Database, make_daemon: MakeDaemon
) -> None:
    """auto_migrate with the daemon's own login: what it lacks, and nothing is changed."""
    daemon = make_daemon(database={"dsn": empty_database.dsn("daemon"), "auto_migrate": True})
    assert "cannot migrate" in await refused(daemon, 1)


@pytest.mark.parametrize("auto_migrate", [False, True])
async def test_a_newer_schema_is_refused(
    auto_migrate: bool,
    database: Database,
    flow: Flow,
    make_daemon: MakeDaemon,
) -> None:
    """Whether it may migrate or not: there is no way back."""
    await flow.superuser.execute(
        "insert into webhookd.schema_migrations (version, name, checksum, webhookd_version)"
        " values (9999, 'of a later day', '', '99.0.0')"
    )
    settings = {"dsn": database.dsn("migrator"), "auto_migrate": auto_migrate}
    line = await refused(make_daemon(database=settings), 1)
    assert "newer than this webhookd" in line
    assert "Upgrade webhookd" in line


# The database and the port.


async def test_no_database_at_the_start(database: Database, make_daemon: MakeDaemon) -> None:
    """Nobody listens there: unavailable, which systemd may try again."""
    host = f"127.0.0.1:{free_port()}"
    line = await refused(make_daemon(database={"dsn": f"postgresql://a:hunter2@{host}/{database.name}"}), 69)
    assert "database unavailable" in line
    assert "hunter2" not in line


async def test_a_wrong_password(database: Database, make_daemon: MakeDaemon) -> None:
    """Told as such, without the password."""
    dsn = readdress(database.dsn("daemon"), database.name, database.login_name("daemon"), "hunter2")
    line = await refused(make_daemon(database={"dsn": dsn}), 69)
    assert "refused this login" in line
    assert "hunter2" not in line


async def test_a_port_that_is_taken(make_daemon: MakeDaemon) -> None:
    """Refused with the address, and not tried for ever by a daemon that says it serves."""
    daemon = make_daemon()
    with socket.create_server(("127.0.0.1", daemon.port)):
        daemon.launch()
        assert await daemon.ended() == 1
        [line] = daemon.said()
        assert f"127.0.0.1:{daemon.port}" in line


# The configuration.

BAD_SETTINGS: dict[str, tuple[dict[str, dict[str, object]], str]] = {
    "unknown key": ({"retry": {"max_attemps": 3}}, "did you mean max_attempts?"),
    "wrong type": ({"retry": {"max_attempts": "three"}}, "retry.max_attempts"),
    "lease and timeout": ({"delivery": {"lease_seconds": 19.9}}, "delivery.lease_seconds"),
    "no authorities": ({"delivery": {"ca_file": "/nowhere/ca.pem"}}, "delivery.ca_file"),
    "no DSN": ({"database": {"dsn": "nonsense"}}, "database.dsn"),
    "no port": ({"api": {"listen": "127.0.0.1:0"}}, "api.listen"),
}


@pytest.mark.parametrize("what", BAD_SETTINGS)
async def test_a_bad_configuration(what: str, make_daemon: MakeDaemon) -> None:
    """Exit 78, by which systemd is told not to try again, and the key that is wrong."""
    settings, words = BAD_SETTINGS[what]
    assert words in await refused(make_daemon(**settings), 78)


async def test_a_file_that_is_not_there(make_daemon: MakeDaemon) -> None:
    """It was named, so it is missed."""
    daemon = make_daemon()
    daemon.config_path.unlink()
    assert "No such file" in await refused(daemon, 78)


async def test_a_file_name_that_is_none(make_daemon: MakeDaemon) -> None:
    """A NUL in it is an error of another kind than a missing file, and no worse."""
    assert "delivery.ca_file" in await refused(make_daemon(delivery={"ca_file": "a\0b"}), 78)


# Services.


async def test_instances_divide_the_services(
    make_daemon: MakeDaemon, session: aiohttp.ClientSession, endpoint: Endpoint, flow: Flow
) -> None:
    """One that has only the API accepts and delivers nothing; one that has all the rest delivers it."""
    front, back = make_daemon(), make_daemon()
    api = Client(session, await front.start("--services", "api"))
    await api.subscribe(endpoint)
    services = {service["name"] for service in (await api.get("/status")).body["services"]}
    assert services == {"api", "listener", "notifier", "monitor"}
    assert (await api.event()).status == 202
    assert await flow.daemon.fetchval("select count(*) from webhookd.event_routing_queue") == 1
    back.launch("--services", ",".join(STAGES))
    await until(flow.daemon, COMPLETED, 1)
    assert len(endpoint.requests) == 2  # with the challenge
    assert back.get("/healthz")[0] == 0
    assert front.metric("webhookd_events_routed_total") == 0
    assert front.metric("webhookd_delivery_attempts_total") == 0


async def test_stages_in_three_processes_wake_each_other(
    make_daemon: MakeDaemon, endpoint: Endpoint, flow: Flow
) -> None:
    """By NOTIFY alone, for nobody polls: more events than a batch go through all three, and a retry too."""
    await subscribed(flow, endpoint)
    endpoint.fail_times(3)
    apart = {"services": {"poll_interval_seconds": 600}, "routing": {"batch_size": 50}}
    for services in ("api,routing", "api,orchestration,reaper", "api,delivery"):
        await make_daemon(**apart, orchestration={"batch_size": 50}, retry={"base_delay_seconds": 0}).start(
            "--services", services
        )
    for count in (1, 300):
        done = await flow.daemon.fetchval("select count(*) from webhookd.events")
        await publish_many(flow, count, [EVENT_TYPE])
        await until(flow.daemon, COMPLETED, done + count)
    assert len(endpoint.requests) == 301 + 3


async def test_the_option_goes_before_the_file(make_daemon: MakeDaemon) -> None:
    """What --services says is not changed by a reload of what the file says."""
    daemon = await make_daemon(services={"enabled": ["api", "routing"]}).start("--services", "api")
    daemon.configure(services={"enabled": ["api", "reaper"]})
    assert await daemon.reload()
    assert not daemon.logged("restart webhookd to apply it")
    assert daemon.metric("webhookd_service_up", service="routing") == 0


async def test_an_unknown_service_is_refused(make_daemon: MakeDaemon) -> None:
    """With the one that was probably meant."""
    daemon = make_daemon()
    daemon.launch("--services", "api,routng")
    assert await daemon.ended() == 2
    [line] = daemon.said()
    assert "--services" in line
    assert "did you mean routing?" in line


async def test_no_service_at_all_is_refused(make_daemon: MakeDaemon) -> None:
    """An instance that does nothing is a mistake."""
    daemon = make_daemon()
    daemon.launch("--services", "")
    assert await daemon.ended() == 78


# The end.


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_the_end_waits_for_a_request(
    how: signal.Signals, flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Asked by systemd or by Ctrl-C: what is under way ends, is reported, and no lease is left."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(delivery=HELD).start()
    await flow.publish()
    await gate.opened(1)
    daemon.process.send_signal(how)
    await daemon.until(lambda: daemon.logged("draining"), "draining")
    assert daemon.process.poll() is None
    gate.let_through(1)
    assert await daemon.ended() == 0
    assert await flow.daemon.fetchval(
        "select array_agg(status) = '{Completed}' from webhookd.webhook_delivery_jobs"
    )
    assert daemon.logged("stopped")


async def test_a_request_that_outlasts_the_grace_keeps_its_lease(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Exit 0 all the same; nobody knows whether it arrived, so it is sent again once the lease is over."""
    await subscribed(flow, endpoint)
    endpoint.hang()
    daemon = await make_daemon(delivery=HELD, services={"shutdown_grace_seconds": 0.2}).start()
    await flow.publish()
    await endpoint.received(1)
    daemon.sigterm()
    assert await daemon.ended() == 0
    assert await flow.daemon.fetchval(LEASED) == 1
    assert all(line.startswith("{") for line in daemon.said())

    endpoint.answer(200)
    await flow.expire_lease(await flow.daemon.fetchval("select id from webhookd.webhook_delivery_jobs"))
    await make_daemon().start()
    await until(flow.daemon, COMPLETED, 1)
    assert [request.headers["webhook-attempt"] for request in endpoint.requests] == ["1", "1"]
    assert await flow.daemon.fetchval("select lease_resets from webhookd.webhook_delivery_jobs") == 1


async def test_a_claim_under_way_leaves_no_lease(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """What was leased and not begun when the signal came is sent, or handed back."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon().start()
    await HOLDABLE_LOADING.take_away(flow.superuser)
    transaction = flow.superuser.transaction()
    await transaction.start()
    # Between lease and request a large payload is read: here it is not to be had.
    await flow.superuser.execute(HOLD_LOADING)
    await flow.publish(payload=LARGE)
    await until(flow.daemon, f"select ({LEASED}) = 1")
    daemon.sigterm()
    await daemon.until(lambda: daemon.logged("draining"), "draining")
    await transaction.commit()
    assert await daemon.ended() == 0
    assert await flow.daemon.fetchval(LEASED) == 0


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_the_end_without_the_database(
    how: str, flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon, wire: Wire
) -> None:
    """Gone or silent, with a result that cannot be reported: exit 0, and who follows delivers it again."""
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
    assert all(line.startswith("{") for line in daemon.said())

    await flow.expire_lease(await flow.daemon.fetchval("select id from webhookd.webhook_delivery_jobs"))
    await make_daemon().start()
    await until(flow.daemon, COMPLETED, 1)
    assert len(endpoint.requests) == 2
