"""`webhookd status`: ready or why not, once or until Ctrl-C; and daemons that are not there."""

import json

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.certificates import Certificates
from tests.support.endpoint import Endpoint
from tests.support.shell import Shell
from tests.support.wire import Wire


async def test_status_says_whether_it_is_ready(make_api: MakeApi, wire: Wire, lonely: Shell) -> None:
    """Exit 0 while it is, 1 with the reason while it is not; a command that needs the database: 69."""
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


async def test_watching_outlives_a_daemon(api: Client, cli: Shell) -> None:
    """It says that the daemon went away, and that it is back; Ctrl-C is exit 130. NO_COLOR is plain."""
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


async def test_no_daemon_is_one_line(api: Client, lonely: Shell) -> None:
    """Exit 69, with where it looked, by whose word, and how to start one; the configuration says it too."""
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


async def test_what_is_there_may_be_another(
    lonely: Shell, endpoint: Endpoint, certificates: Certificates
) -> None:
    """An https URL is verified; what is no webhookd is told in a line; a redirect is not followed."""
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
    asked = len(endpoint.requests)
    endpoint.redirect_to(endpoint.url("/else"))
    assert (await cli.run("status", *trusting)).exit_code == 1
    assert len(endpoint.requests) == asked + 1
    endpoint.close_at_once()
    assert (await cli.run("status", *trusting)).exit_code == 69
