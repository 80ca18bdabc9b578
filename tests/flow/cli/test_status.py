"""`webhookd status`: readiness, --watch, and servers that are missing or are not webhookd."""

import json

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.certificates import Certificates
from tests.support.endpoint import Endpoint
from tests.support.shell import Shell
from tests.support.wire import Wire


async def test_status_reports_readiness(make_api: MakeApi, wire: Wire, lonely: Shell) -> None:
    """Exit 0 if ready, 1 with the reason if not; commands that need the database exit with 69."""
    api = await make_api(database={"dsn": wire.dsn})
    cli = lonely.having(WEBHOOKD_URL=f"http://localhost:{api.daemon.port}/")
    ready = await cli.done("status")
    assert ready.out.startswith("ready ")
    assert "5 attempts" in ready.out
    assert "\x1b" not in ready.out
    assert (await cli.done("status", "--json")).documents[0]["ready"] is True
    wire.cut()
    await api.daemon.until(lambda: api.daemon.get("/readyz")[0] == 503, "unready")
    unready = await cli.run("status")
    assert unready.exit_code == 1
    assert unready.out.startswith("not ready: the database does not answer")
    away = await cli.run("deliveries", "list")
    assert (away.exit_code, "(unavailable)" in away.error) == (69, True)


async def test_watch_survives_a_restart_of_the_daemon(api: Client, cli: Shell) -> None:
    """It shows `unreachable` and then `ready` again; Ctrl-C is exit 130. NO_COLOR prints plain text."""
    with cli.on_terminal("status", "--watch", "--interval", "0.1") as terminal:
        await terminal.shows("\x1b[32mready")
        api.daemon.kill()
        await terminal.shows("unreachable")
        await api.daemon.start()
        await terminal.shows("\x1b[32mready")
        terminal.interrupt()
        assert await terminal.ended() == 130
        assert "Traceback" not in terminal.written
    with cli.having(NO_COLOR="1").on_terminal("status") as terminal:
        assert await terminal.ended() == 0
        assert terminal.written.startswith("ready ")
        assert "\x1b" not in terminal.written
        assert "─" not in terminal.written


async def test_missing_daemon_is_reported_in_one_line(api: Client, lonely: Shell) -> None:
    """Exit 69, with the URL, its source and how to start a daemon. An invalid URL is exit 2."""
    ran = await lonely.run("status")
    assert (ran.exit_code, ran.out) == (69, "")
    assert "http://127.0.0.1:1 (WEBHOOKD_URL)" in ran.error
    assert "webhookd serve" in ran.error
    ran = await lonely.run("status", "--url", "http://nowhere.invalid")
    assert (ran.exit_code, "(--url)" in ran.error) == (69, True)
    configured = lonely.having(WEBHOOKD_URL="", WEBHOOKD_CONFIG=str(api.daemon.config_path))
    assert (await configured.run("status")).exit_code == 0
    for url in (
        "ftp://a",
        "http://",
        "http://a:b@c",
        "http://a?token=1",
        "127.0.0.1:8470",
        "http://a:x",
        "http://[:",
    ):
        ran = await lonely.run("status", "--url", url)
        assert (ran.exit_code, ran.error.startswith("webhookd: --url: ")) == (2, True), ran


async def test_other_servers_are_reported_in_one_line(
    lonely: Shell, endpoint: Endpoint, certificates: Certificates
) -> None:
    """Certificates are verified, other responses are rejected, redirects are not followed."""
    cli = lonely.having(WEBHOOKD_URL=endpoint.url(""))
    untrusted = await cli.run("status")
    assert (untrusted.exit_code, "certificate is not trusted" in untrusted.error) == (69, True)
    trusting = ("--ca-file", str(certificates.ca_file))
    endpoint.answer(200, json.dumps({"ready": True}).encode())
    assert (await cli.done("status", *trusting)).out.startswith("ready ")
    for status, body in ((200, b"<html>"), (404, b"\x1b[2J"), (200, b"[]"), (200, b'{"backlog": {}}')):
        endpoint.answer(status, body)
        ran = await cli.run("status", *trusting)
        assert (ran.exit_code, "\x1b" in ran.error) == (1, False), ran
    before = len(endpoint.requests)
    endpoint.redirect_to(endpoint.url("/else"))
    assert (await cli.run("status", *trusting)).exit_code == 1
    assert len(endpoint.requests) == before + 1
    endpoint.close_at_once()
    assert (await cli.run("status", *trusting)).exit_code == 69
