"""`webhookd subscriptions`: create, verify, pause, change; secrets are shown only once."""

from tests.support.endpoint import Endpoint
from tests.support.shell import Shell
from tests.support.traffic import verifies


async def test_life_of_a_subscription(cli: Shell, endpoint: Endpoint) -> None:
    """Create, verify, deliver, rotate, pause, resume, change; each command prints what it did."""
    endpoint.answer(500)
    created = await cli.done(
        *("subscriptions", "create", "order.created", endpoint.url("/hook")),
        *("--max-attempts", "3", "--header", "x-shop: 7", "--description", "the \x1b[31mshop"),
    )
    assert "shown only once" in created.err
    fields = {line.split()[0]: line.split()[-1] for line in created.out.splitlines()}
    assert fields["secret"].startswith("whsec_")
    assert "\x1b" not in created.out
    refused = await cli.run("subscriptions", "verify", "1")
    assert refused.exit_code == 1
    assert "responded with 500 (verification_failed)" in refused.error

    endpoint.echo_challenge()
    assert (await cli.done("subscriptions", "verify", "1")).out == "subscription 1 is verified\n"
    await cli.done("publish", "order.created", "{}")
    [_, _, delivered] = await endpoint.received(3)
    assert delivered.headers["x-shop"] == "7"
    assert verifies(delivered, fields["secret"])
    rotated = await cli.done("subscriptions", "rotate-secret", "1")
    assert rotated.out.split()[1] != fields["secret"]
    shown = await cli.done("subscriptions", "show", "1")
    assert "whsec_" not in shown.out + (await cli.done("subscriptions", "show", "1", "--json")).out

    assert (await cli.done("subscriptions", "pause", "1")).out == "subscription 1 is paused\n"
    [row] = (await cli.done("subscriptions", "list", "--paused", "--json")).documents
    assert (row["active"], row["paused"], row["max_attempts"]) == (True, True, 3)
    assert (await cli.done("subscriptions", "list", "--not-paused")).out == ""
    assert (await cli.done("subscriptions", "disable", "1")).out == "subscription 1 is disabled\n"
    resumed = await cli.done("subscriptions", "resume", "1")
    assert resumed.out == "subscription 1 is disabled: webhookd subscriptions enable 1\n"
    assert (await cli.done("subscriptions", "enable", "1")).out == "subscription 1 is active\n"
    changed = ("subscriptions", "change", "1", "--callback-url", endpoint.url("/new"), "--default-policy")
    [row] = (await cli.done(*changed, "--json")).documents
    assert (row["verified"], row["pending_callback_url"], row["max_attempts"]) == (
        True,
        endpoint.url("/new"),
        None,
    )
    assert "not verified" in (await cli.done("subscriptions", "show", "1")).out
    assert (await cli.run("subscriptions", "change", "1")).exit_code == 2


async def test_secret_headers_are_read_from_a_file(cli: Shell, endpoint: Endpoint) -> None:
    """As an argument it is rejected and not repeated; from a file or stdin it is sent."""
    words = ("subscriptions", "create", "order.created", endpoint.url("/hook"))
    refused = await cli.run(*words, "--header", "Authorization: hunter2")
    assert (refused.exit_code, "--header-file" in refused.error) == (2, True)
    assert "hunter2" not in refused.err
    for given in (b"", b"hunter2", b"A: 1\na: 2", b"x" * 70_000):
        refused = await cli.run(*words, "--header-file", "-", given=given)
        assert (refused.exit_code, "hunter2" in refused.error) == (2, False)
    await cli.done(*words, "--header-file", "-", given=b"Authorization: Bearer hunter2\n")
    endpoint.echo_challenge()
    await cli.done("subscriptions", "verify", "1")
    assert endpoint.requests[-1].headers["authorization"] == "Bearer hunter2"
