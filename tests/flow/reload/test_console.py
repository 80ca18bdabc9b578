"""Reload of the console's settings."""

from datetime import UTC, datetime
from pathlib import Path

from tests.flow.conftest import MakeApi
from tests.flow.reload.swaps import swaps
from tests.support.api import tokens
from tests.support.flow import Flow

SESSION_SECONDS = "select extract(epoch from session_expires_at - now()) from webhookd.console_links"


@swaps("api.public_url", "console.session_seconds")
async def test_links_use_the_new_address_and_lifetime(make_api: MakeApi, flow: Flow) -> None:
    """The next link has both; no link can be created for another person after the address is removed."""
    entries = tokens({"all": ("read", "subscriptions")})
    first = {"tokens": entries, "public_url": "https://old.example"}
    api = (await make_api(api=first, console={"session_seconds": 600})).as_token("all")
    api.daemon.token = "all"
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    made = await api.post("/v1/console/login-link")
    assert made.body["url"].startswith("https://old.example/login?code=")
    assert abs(await flow.superuser.fetchval(SESSION_SECONDS) - 600) < 60
    await flow.superuser.execute("delete from webhookd.console_links")

    api.daemon.configure(
        api={"tokens": entries, "public_url": "https://new.example"}, console={"session_seconds": 6000}
    )
    assert await api.daemon.reload()
    made = await api.post("/v1/console/login-link")
    assert made.body["url"].startswith("https://new.example/login?code=")
    assert datetime.fromisoformat(made.body["expires_at"]) > datetime.now(UTC)
    assert abs(await flow.superuser.fetchval(SESSION_SECONDS) - 6000) < 60
    assert (await api.post("/v1/tenants/acme/portal-link")).status == 201

    api.daemon.configure(api={"tokens": entries, "public_url": ""})
    assert await api.daemon.reload()
    assert (await api.post("/v1/tenants/acme/portal-link")).problem == (409, "public_url_missing")


# What a page shows is in the tests of the pages.
@swaps("console.name", "console.frame_ancestors", "console.logo")
async def test_appearance_needs_no_restart(make_api: MakeApi, tmp_path: Path) -> None:
    """A reload accepts them. The logo's file is read again by each reload, also if its path is the same."""
    api = await make_api()
    logo = tmp_path / "logo"
    logo.write_bytes(b"\xff\xd8\xff\xe0")
    appearance = {"name": "Acme", "frame_ancestors": ["https://app.example.com"], "logo": str(logo)}
    api.daemon.configure(console=appearance)
    assert await api.daemon.reload()
    assert (await api.get("/status")).body["configuration"]["restart_needed"] == []
    logo.write_text("no image")
    assert not await api.daemon.reload()
    logo.write_bytes(b"\x89PNG\r\n\x1a\n")
    assert await api.daemon.reload()
