"""Commands of a support engineer: tenants, events, test, replay, resend, retry, delete."""

from tests.support.api import Client
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.shell import Shell
from tests.support.waiting import until

DELIVERED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"
ROUTED = "select not exists (select from webhookd.event_routing_queue)"


async def subscribed(cli: Shell, endpoint: Endpoint, *words: str) -> None:
    """Create and verify a subscription."""
    endpoint.echo_challenge()
    await cli.done("subscriptions", "create", "order.*,invoice.paid", endpoint.url("/hook"), *words)
    await cli.done("subscriptions", "verify", "1")


async def test_tenant_gets_its_events(cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """Tenants are set and shown, and events are found by tenant, label, key and time."""
    shown = await cli.done("tenants", "set", "acme", "--name", "Acme Ltd", "--max-subscriptions", "1")
    assert "Acme Ltd" in shown.out
    await subscribed(cli, endpoint, "--tenant", "acme", "--filter", "region=eu")
    words = ("--tenant", "acme", "--label", "region=eu", "--key", "k", "--correlation-id", "c")
    await cli.done("publish", "order.paid", "{}", *words)
    await cli.done("publish", "order.paid", "{}")
    await until(flow.daemon, DELIVERED, 1)
    for query in (
        ("--tenant", "acme"),
        ("--label", "region=eu"),
        ("--key", "k"),
        ("--correlation-id", "c"),
        ("--tenant", "acme", "--event-type", "order.paid", "--created-after", "1h"),
    ):
        [event] = (await cli.done("events", "list", *query, "--json")).documents
        assert (event["id"], event["labels"]) == (1, {"region": "eu"})
    assert "region=eu" in (await cli.done("events", "show", "1")).out
    assert len((await cli.done("events", "list", "--json")).documents) == 2
    [delivery] = (await cli.done("deliveries", "list", "--tenant", "acme", "--json")).documents
    assert delivery["event_id"] == 1
    refused = await cli.run("subscriptions", "create", "a", endpoint.url("/x"), "--tenant", "acme")
    assert (refused.exit_code, "limit_reached" in refused.error) == (1, True)
    assert "1 of 1" in (await cli.done("tenants", "list")).out
    assert "inactive" in (await cli.done("tenants", "set", "acme", "--inactive", "--no-limit")).out
    assert (await cli.run("tenants", "show", "globex")).exit_code == 1
    for bad in (("--tenant", "a b"), ("--label", "region")):
        assert (await cli.run("publish", "a", "{}", *bad)).exit_code in (1, 2), bad


async def test_tenant_is_a_filter_of_dead_letters(cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """`list` and `requeue` select those of the tenant; the printed command has the filter too."""
    await subscribed(cli, endpoint, "--tenant", "acme", "--max-attempts", "1")
    endpoint.answer(500)
    await cli.done("publish", "order.paid", "{}", "--tenant", "acme")
    await until(flow.daemon, "select exists (select from webhookd.dead_letters)")
    [letter] = (await cli.done("dead-letters", "list", "--tenant", "acme", "--json")).documents
    assert letter["subscription_id"] == 1
    assert (await cli.done("dead-letters", "list", "--tenant", "globex")).out == ""
    dry = await cli.run("dead-letters", "requeue", "--tenant", "acme")
    assert (dry.exit_code, dry.out) == (1, "1 match, 1 would be requeued, 0 skipped\n")
    assert "requeue --tenant acme --yes" in dry.err
    assert "0 match" in (await cli.done("dead-letters", "requeue", "--tenant", "globex", "--yes")).out
    endpoint.answer(200)
    done = await cli.done("dead-letters", "requeue", "--tenant", "acme", "--yes")
    assert done.out == "1 match, 1 requeued, 0 skipped\n"


async def test_hold_reasons_are_listed(cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """A tenant that is not active shows on its subscription and its deliveries, with the command for it."""
    await subscribed(cli, endpoint, "--tenant", "acme")
    await cli.done("tenants", "set", "acme", "--inactive")
    await cli.done("publish", "order.paid", "{}", "--tenant", "acme")
    await until(flow.daemon, "select exists (select from webhookd.webhook_delivery_sagas)")
    assert "held: tenant inactive" in (await cli.done("deliveries", "list")).out
    assert "tenant inactive" in (await cli.done("subscriptions", "list")).out
    assert "tenant inactive" in (await cli.done("subscriptions", "show", "1")).out
    resumed = await cli.done("subscriptions", "resume", "1")
    words = "subscription 1 is held (tenant acme is not active): webhookd tenants set acme --active\n"
    assert resumed.out == words
    await cli.done("publish", "order.paid", "{}", "--tenant", "globex")
    shown = (await cli.done("events", "show", "2")).out
    words = (
        "Tenant globex has no subscription to order.paid. 1 subscription of another tenant or of none matches"
    )
    assert words in " ".join(shown.split())


async def test_endpoint_is_tested(cli: Shell, endpoint: Endpoint) -> None:
    """Exit code 1 if the endpoint fails; nothing is stored."""
    await subscribed(cli, endpoint)
    assert "200" in (await cli.done("subscriptions", "test", "1")).out
    endpoint.answer(503)
    words = ("subscriptions", "test", "1", "--event-type", "order.paid", "--payload", '{"a": 1}')
    failed = await cli.run(*words)
    assert (failed.exit_code, "503" in failed.out) == (1, True)
    assert endpoint.requests[-1].body == b'{"a": 1}'
    assert (await cli.done("events", "list")).out == ""


async def test_missed_events_are_replayed(cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """Without --yes it counts, and exits with 1; with it, each is delivered once."""
    for _ in range(3):
        await cli.done("publish", "order.paid", "{}")
    await until(flow.daemon, ROUTED)
    await subscribed(cli, endpoint)
    words = ("subscriptions", "replay", "1", "--since", "1h")
    counted = await cli.run(*words)
    matching = "3 events examined; 3 match the subscription and were never routed to it\n"
    assert (counted.exit_code, counted.out) == (1, f"{matching}3 deliveries would be created\n")
    assert "add --yes" in counted.err
    assert (await cli.done(*words, "--yes")).out == f"{matching}3 deliveries created\n"
    await until(flow.daemon, DELIVERED, 3)
    assert (await cli.done(*words)).out == (
        "3 events examined; 0 match the subscription and were never routed to it\n"
        "0 deliveries would be created\n"
    )
    again = await cli.done(*words, "--include", "all", "--yes", "--json")
    assert again.documents[-1]["created"] == 3
    assert (await cli.run("subscriptions", "replay", "1", "--since", "soon")).exit_code == 2


async def test_delivery_is_resent_and_retried(
    cli: Shell, api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """Resend a finished one, and make a waiting one due."""
    # Otherwise the delay of an hour would be cut to the maximum of the other tests, a fifth of a second.
    api.daemon.configure(retry={"max_delay_seconds": 3600.0})
    assert await api.daemon.reload()
    await subscribed(cli, endpoint, "--base-delay-seconds", "3600")
    await cli.done("publish", "order.paid", "{}")
    await until(flow.daemon, DELIVERED, 1)
    endpoint.answer(500)
    assert (await cli.done("deliveries", "resend", "1")).out == "delivery 1: resent as delivery 2\n"
    await until(
        flow.daemon, "select status = 'PendingRetry' from webhookd.webhook_delivery_sagas where id = 2"
    )
    endpoint.answer(200)
    assert "due now" in (await cli.done("deliveries", "retry", "2")).out
    await until(flow.daemon, DELIVERED, 2)
    assert "repeats" in (await cli.done("deliveries", "show", "2")).out
    refused = await cli.run("deliveries", "retry", "2")
    assert (refused.exit_code, "wrong_status" in refused.error) == (1, True)


async def test_subscription_is_deleted_after_a_question(cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """Without --yes and without an answer nothing is deleted. What waited for it is shown as never sent."""
    await subscribed(cli, endpoint)
    await cli.done("subscriptions", "pause", "1")
    await cli.done("publish", "order.paid", "{}")
    await until(flow.daemon, "select exists (select from webhookd.webhook_delivery_sagas)")
    assert "held: paused" in (await cli.done("deliveries", "list")).out
    assert (await cli.run("subscriptions", "delete", "1", given=b"n\n")).exit_code != 0
    assert (await cli.done("subscriptions", "delete", "1", "--yes")).out == "subscription 1 is deleted\n"
    assert (await cli.run("subscriptions", "show", "1")).exit_code == 1
    for words in (("deliveries", "list"), ("deliveries", "show", "1"), ("events", "show", "1")):
        shown = (await cli.done(*words)).out
        assert "never sent: the subscription is deleted" in shown
        assert "held" not in shown.lower()
