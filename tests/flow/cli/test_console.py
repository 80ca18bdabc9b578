"""`webhookd console`, `webhookd tenants portal-link`, and the address that `serve` prints."""

import stat
from pathlib import Path

import pytest

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.support.api import Client, tokens
from tests.support.flow import Flow
from tests.support.shell import Shell
from webhookd.console import links

PUBLIC = "https://hooks.example.com"
SCOPES = ("read", "subscriptions", "operate")


@pytest.fixture
async def secured(make_api: MakeApi, tmp_path: Path) -> Shell:
    """A command line with a token, for a daemon that has a public address and a tenant."""
    api = await make_api(api={"tokens": tokens({"all": SCOPES}), "public_url": PUBLIC})
    assert (await api.as_token("all").request("PUT", "/v1/tenants/acme", json={})).status == 201
    return Shell(tmp_path, {"WEBHOOKD_URL": f"http://127.0.0.1:{api.daemon.port}", "WEBHOOKD_TOKEN": "all"})


def recording_browser(folder: Path) -> tuple[str, Path]:
    """Return a value for BROWSER, and the file that gets the address that it was called with."""
    opened, program = folder / "opened", folder / "browser"
    program.write_text(f'#!/bin/sh\nprintf "%s" "$1" > "{opened}"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{program} %s", opened


# webhookd console


async def test_console_prints_a_login_link(secured: Shell, flow: Flow) -> None:
    """The link alone on stdout, so that a script can use it; it logs in once."""
    for words in ((), ("--print",)):
        ran = await secured.done("console", *words)
        [url] = ran.out.splitlines()
        assert (url.startswith(f"{PUBLIC}/login?code="), ran.err) == (True, "")
        code = url.partition("code=")[2]
        redeemed = await links.redeem_link(flow.daemon, "login", code)
        assert redeemed is not None
        assert redeemed.actor == "all"
    [document] = (await secured.done("console", "--json")).documents
    assert set(document) == {"url", "expires_at"}


async def test_console_without_tokens(cli: Shell, api: Client, flow: Flow) -> None:
    """No login is needed: the plain address, and no link is stored."""
    address = f"http://127.0.0.1:{api.daemon.port}/"
    assert (await cli.done("console")).out == f"{address}\n"
    assert (await cli.done("console", "--json")).documents == [{"url": address, "expires_at": None}]
    assert await flow.superuser.fetchval("select count(*) from webhookd.console_links") == 0


async def test_console_opens_the_browser_on_a_terminal(secured: Shell, tmp_path: Path) -> None:
    """With the printed link; not without a terminal, and not with --print or --json."""
    browser, opened = recording_browser(tmp_path)
    shell = secured.having(BROWSER=browser)
    await shell.done("console")
    for words in (("--print",), ("--json",)):
        with shell.on_terminal("console", *words) as terminal:
            assert await terminal.ended() == 0
    assert not opened.exists()
    with shell.on_terminal("console") as terminal:
        assert await terminal.ended() == 0
        shown = "".join(terminal.written.split("\n"))
    url = opened.read_text()
    assert url.startswith(f"{PUBLIC}/login?code=")
    assert url in shown
    assert "five minutes" in shown


async def test_console_without_a_browser_prints_only(secured: Shell) -> None:
    """A machine without a graphical session is the usual server; a browser in the terminal is not used."""
    empty = {"BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": "", "PATH": "/nonexistent"}
    with secured.having(**empty).on_terminal("console") as terminal:
        assert await terminal.ended() == 0
        assert f"{PUBLIC}/login?code=" in terminal.written


async def test_console_errors(secured: Shell, lonely: Shell, make_api: MakeApi, tmp_path: Path) -> None:
    """One line: a wrong token, no daemon, and a token without the scope."""
    refused = await secured.having(WEBHOOKD_TOKEN="wrong").run("console")
    assert refused.exit_code == 1
    assert "token" in refused.error
    assert (await lonely.run("console")).exit_code == 69
    api = await make_api(api={"tokens": tokens({"shop": ("ingest",)})})
    shop = Shell(tmp_path, {"WEBHOOKD_URL": f"http://127.0.0.1:{api.daemon.port}", "WEBHOOKD_TOKEN": "shop"})
    assert "scope read" in (await shop.run("console")).error


# webhookd tenants portal-link


async def test_portal_link_is_printed(secured: Shell, flow: Flow) -> None:
    """The link alone on stdout; its session has what --allow names, and ends with --expires-in."""
    ran = await secured.done(
        "tenants", "portal-link", "acme", "--expires-in", "2h", "--allow", "manage, resend"
    )
    [url] = ran.out.splitlines()
    assert (url.startswith(f"{PUBLIC}/portal/enter?code="), ran.err) == (True, "")
    left = await flow.superuser.fetchval(
        "select extract(epoch from expires_at - now()) from webhookd.console_links"
    )
    assert 7000 < left <= 7200
    redeemed = await links.redeem_link(flow.daemon, "portal", url.partition("code=")[2])
    assert redeemed is not None
    assert redeemed.capabilities == {"view", "manage", "resend"}
    [document] = (await secured.done("tenants", "portal-link", "acme", "--json")).documents
    assert document["capabilities"] == ["view"]


async def test_portal_link_on_a_terminal(secured: Shell) -> None:
    """It says how long the link works, and what it allows."""
    with secured.on_terminal("tenants", "portal-link", "acme", "--allow", "secrets") as terminal:
        assert await terminal.ended() == 0
        assert "Works once, until " in terminal.written
        assert "view, secrets" in " ".join(terminal.written.split())


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (("acme", "--allow", "admin"), 2, "none of view, manage, resend, secrets"),
        (("acme", "--allow", ""), 2, "none of view, manage, resend, secrets"),
        (("acme", "--expires-in", "59s"), 2, "60s to 7d"),
        (("acme", "--expires-in", "8d"), 2, "60s to 7d"),
        (("acme", "--expires-in", "3600"), 2, "not a length of time"),
        (("acme", "--expires-in", "1w"), 2, "not a length of time"),
        (("a b",), 2, "a tenant is 1 to 100 letters"),
        (("globex",), 1, "tenant globex does not exist"),
    ],
)
async def test_portal_link_mistakes(
    secured: Shell, words: tuple[str, ...], exit_code: int, message: str
) -> None:
    """A usage error or a rejection is one line."""
    ran = await secured.run("tenants", "portal-link", *words)
    assert (ran.exit_code, ran.out) == (exit_code, "")
    assert message in ran.error


# webhookd serve


@pytest.mark.parametrize(
    ("settings", "address"),
    [({}, "http://127.0.0.1:{port}/"), ({"public_url": PUBLIC}, f"{PUBLIC}/")],
)
async def test_serve_logs_the_address(
    make_daemon: MakeDaemon, settings: dict[str, object], address: str
) -> None:
    """JSON: a field of the line about the start."""
    daemon = await make_daemon(api=settings).start()
    [line] = daemon.logged("started: ")
    assert line["console"] == address.format(port=daemon.port)


async def test_serve_prints_the_address(make_daemon: MakeDaemon) -> None:
    """Text: a line that contains nothing else."""
    daemon = await make_daemon(log={"format": "text"}).start()
    assert f"console: http://127.0.0.1:{daemon.port}/" in daemon.log_path.read_text().splitlines()


async def test_instance_without_the_api_has_no_console(make_daemon: MakeDaemon) -> None:
    """Nothing is printed that a browser could not open."""
    daemon = make_daemon()
    daemon.launch("--services", "routing")
    await daemon.until(lambda: daemon.logged("started: "), "started")
    assert "console" not in daemon.logged("started: ")[0]
