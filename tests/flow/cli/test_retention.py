"""`webhookd retention`, `tenants erase` and `subscriptions delete --erase`."""

from tests.flow.test_lifecycle import publish_many
from tests.support.api import Client
from tests.support.database import Database
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.shell import Shell
from tests.support.sweeps import let_pass, rows
from tests.support.waiting import until

DELIVERED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"
PERIODS = {"WEBHOOKD_RETENTION_EVENTS_DAYS": "30", "WEBHOOKD_RETENTION_PAYLOADS_DAYS": "7"}


async def test_one_pass_removes_what_is_old(cli: Shell, flow: Flow, database: Database) -> None:
    """The dry run counts the same and removes nothing; a second pass has nothing to do."""
    shell = cli.having(WEBHOOKD_DATABASE_DSN=database.dsn("daemon"), **PERIODS)
    await publish_many(flow, 20, ["orders"])
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")
    await let_pass(flow.superuser, 31)
    await publish_many(flow, 3, ["orders"])
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")
    await let_pass(flow.superuser, 8)
    counted = await shell.done("retention", "run", "--dry-run")
    assert counted.out == "20 events would be removed\n23 payloads would be removed\n"
    status = await shell.done("retention", "status")
    assert "9d behind" in status.out, status.out
    ran = await shell.done("retention", "run", "--json")
    assert ran.documents == [{"dry_run": False, "payloads": 23, "events": 20}]
    assert await rows(flow.superuser) == {"events": 3}
    assert (await shell.done("retention", "run")).out == "Nothing to remove.\n"
    shown = await shell.done("retention", "status")
    assert "up to date" in shown.out
    assert (await shell.done("retention", "status", "--json")).documents[0]["lag_seconds"] < 60


async def test_removed_payloads_are_counted(
    api: Client, cli: Shell, endpoint: Endpoint, flow: Flow, database: Database
) -> None:
    """A requeue and a replay say how many they leave out, and a dead letter shows that it has no payload."""
    await api.subscribe(endpoint, max_attempts=1)
    endpoint.answer(500)
    await cli.done("publish", "order.created", "{}")
    await until(flow.daemon, "select exists (select from webhookd.dead_letters)")
    await let_pass(flow.superuser, 31)
    shell = cli.having(WEBHOOKD_DATABASE_DSN=database.dsn("daemon"))
    periods = {"WEBHOOKD_RETENTION_PAYLOADS_DAYS": "7", "WEBHOOKD_RETENTION_DEAD_LETTERS_DAYS": "7"}
    assert (await shell.having(**periods).done("retention", "run")).out == "1 payloads removed\n"
    assert "payload removed" in (await cli.done("dead-letters", "list")).out
    assert "removed by retention" in (await cli.done("dead-letters", "show", "1")).out
    requeued = await cli.done("dead-letters", "requeue", "--all")
    words = "1 match, 0 would be requeued, 1 skipped (1 whose payload was removed)\n"
    assert requeued.out == words
    replayed = await cli.done("subscriptions", "replay", "1", "--since", "100d", "--include", "all")
    assert "1 event left out: the payload was removed" in replayed.out
    for path, body in (
        ("/v1/dead-letters/requeue", {}),
        ("/v1/subscriptions/1/replay", {"since": "2020-01-01T00:00:00Z", "include": "all"}),
    ):
        assert (await api.post(path, body)).body["payload_removed"] == 1


async def test_pass_without_periods_removes_nothing(cli: Shell, flow: Flow, database: Database) -> None:
    """Everything is kept by default, and the status says so."""
    shell = cli.having(WEBHOOKD_DATABASE_DSN=database.dsn("daemon"))
    await publish_many(flow, 1, ["orders"])
    await let_pass(flow.superuser, 10_000)
    assert (await shell.done("retention", "run")).out == "Nothing to remove.\n"
    assert "kept forever" in (await shell.done("retention", "status")).out
    bad = await shell.having(WEBHOOKD_RETENTION_EVENTS_DAYS="-1").run("retention", "run")
    assert (bad.exit_code, "EVENTS_DAYS" in bad.error) == (78, True)


async def test_pass_is_refused_while_another_runs(cli: Shell, flow: Flow, database: Database) -> None:
    """It names the reason and changes nothing."""
    shell = cli.having(WEBHOOKD_DATABASE_DSN=database.dsn("daemon"), **PERIODS)
    await until(flow.daemon, "select webhookd.take_retention_turn('another', 60)")
    refused = await shell.run("retention", "run")
    assert (refused.exit_code, "another instance" in refused.error) == (69, True)


async def test_tenant_is_erased(cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """Its name must be typed, or --yes given; the command waits for the end and prints the counts."""
    endpoint.echo_challenge()
    await cli.done("subscriptions", "create", "orders", endpoint.url("/hook"), "--tenant", "acme")
    await cli.done("subscriptions", "verify", "1")
    await cli.done("publish", "orders", "{}", "--tenant", "acme")
    await until(flow.daemon, DELIVERED, 1)
    wrong = await cli.run("tenants", "erase", "acme", given=b"acne\n")
    assert (wrong.exit_code, await rows(flow.superuser) == {}) == (1, False)
    erased = await cli.done("tenants", "erase", "acme", given=b"acme\n")
    assert "erased: 1 events, 1 deliveries, 1 attempts, 1 subscriptions" in erased.out
    assert "evidence: webhookd erasures show 1" in erased.out
    assert await rows(flow.superuser) == {}
    assert (await cli.run("tenants", "erase", "acme", "--yes")).exit_code == 1


async def test_erasures_are_listed_and_shown(cli: Shell, flow: Flow) -> None:
    """Filters by status, by tenant (also after its name was erased) and by subscription."""
    for tenant in ("acme", "globex"):
        await cli.done("subscriptions", "create", "orders", "https://acme.example/hook", "--tenant", tenant)
    assert (await cli.done("erasures", "list", "--json")).out == ""
    await cli.done("tenants", "erase", "acme", "--yes")
    # A transaction from before the request keeps the second one running.
    await flow.superuser.execute("begin")
    await flow.superuser.execute("select pg_current_xact_id()")
    await flow.daemon.execute("select webhookd.erase_subscription(2, 'me')")
    finished, running = "1", "2"
    for words, expected in (
        ((), [running, finished]),
        (("--status", "running"), [running]),
        (("--status", "finished"), [finished]),
        (("--tenant", "acme"), [finished]),
        (("--tenant", "globex"), [running]),
        (("--tenant", "other"), []),
        (("--subscription", "2"), [running]),
        (("--subscription", "1"), []),
        (("--limit", "1"), [running]),
    ):
        listed = (await cli.done("erasures", "list", *words, "--json")).documents
        assert [str(row["id"]) for row in listed] == expected, words
    assert [row[0] for row in (await cli.done("erasures", "list")).rows] == ["id", running, finished]
    shown = await cli.done("erasures", "show", finished)
    assert ["subscriptions", "1"] in shown.rows
    assert "sha256:" in shown.out
    assert (await cli.run("erasures", "show", "99")).exit_code == 1
    assert (await cli.run("erasures", "list", "--status", "other")).exit_code == 2
    await flow.superuser.execute("rollback")
