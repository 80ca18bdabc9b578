"""A reload of an invalid file changes no setting; it is logged and counted, and a valid file works again."""

from collections.abc import Callable

import pytest

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.flow.test_scenarios import subscribed
from tests.support.api import tokens
from tests.support.daemon import RELOADS, DaemonProcess
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow

Break = Callable[[DaemonProcess], object]


def text(change: Callable[[str], str]) -> Break:
    """Change the text of the file."""
    return lambda daemon: daemon.config_path.write_text(change(daemon.config_path.read_text()))


def setting(section: str, **values: object) -> Break:
    """Change a setting."""
    return lambda daemon: daemon.configure(**{section: values})


def no_certificate(daemon: DaemonProcess) -> None:
    """Configure a CA file without a certificate."""
    path = daemon.folder / "empty.pem"
    path.write_text("nothing\n")
    daemon.configure(delivery={"ca_file": str(path)})


def no_image(daemon: DaemonProcess) -> None:
    """Configure a logo that is a text."""
    path = daemon.folder / "logo.png"
    path.write_text("nothing\n")
    daemon.configure(console={"logo": str(path)})


def replace_with_folder(daemon: DaemonProcess) -> None:
    """Replace the file with a folder."""
    daemon.config_path.unlink()
    daemon.config_path.mkdir()


# How the file is broken, and the text that the log message must contain.
BROKEN: dict[str, tuple[Break, str]] = {
    "syntax": (text(lambda good: good + "[retry\n"), "is not TOML"),
    "duplicate section": (text(lambda good: good + "[log]\n"), "is not TOML"),
    "byte order mark": (text(lambda good: "\ufeff" + good), "is not TOML"),
    "not UTF-8": (lambda daemon: daemon.config_path.write_bytes(b"\xff"), "is not TOML"),
    "unknown key": (setting("retry", max_attemps=3), "did you mean max_attempts?"),
    "unknown section": (setting("deliver", concurrency=3), "did you mean delivery?"),
    "wrong type": (setting("retry", max_attempts="three"), "retry.max_attempts"),
    "out of range": (setting("delivery", concurrency=0), "delivery.concurrency"),
    "lease and timeout": (
        setting("delivery", timeout_seconds=15, lease_seconds=19.9),
        "delivery.lease_seconds",
    ),
    "invalid network": (setting("delivery", allow_networks=["127.0.0.1/8"]), "delivery.allow_networks"),
    "token without a digest": (
        setting("api", tokens=[{"name": "a", "sha256": "a", "scopes": ["read"]}]),
        "api.tokens",
    ),
    "duplicate token": (
        setting("api", tokens=tokens({"a": ["read"]}) * 2),
        "api.tokens: the name a is used twice",
    ),
    "missing file": (lambda daemon: daemon.config_path.unlink(), "No such file"),
    "folder": (replace_with_folder, "Is a directory"),
    "missing CA file": (setting("delivery", ca_file="/nowhere/ca.pem"), "delivery.ca_file"),
    "CA file without a certificate": (no_certificate, "delivery.ca_file"),
    "public URL with a path": (setting("api", public_url="https://a.example/b"), "api.public_url"),
    "no origin": (setting("console", frame_ancestors=["https://a.example; script-src *"]), "frame_ancestors"),
    "missing logo": (setting("console", logo="/nowhere/logo.png"), "console.logo"),
    "logo that is no image": (no_image, "console.logo"),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_invalid_file_changes_nothing(how: str, make_api: MakeApi) -> None:
    """One log line and the metric report it; no other setting of the file applies; a valid file fixes it."""
    api = await make_api(api={"max_payload_bytes": 1024})
    daemon = api.daemon
    break_file, words = BROKEN[how]
    # These changes would be visible if part of the file were applied.
    daemon.configure(api={"max_payload_bytes": 4096}, retry={"max_attempts": 7})
    valid = daemon.config_path.read_text()
    break_file(daemon)
    assert not await daemon.reload()
    [line] = daemon.logged("configuration not reloaded")
    assert words in line["message"]
    assert "\n" not in line["message"]
    assert "exception" not in line
    assert (await api.event(payload="x" * 2000)).status == 413
    assert (await api.get("/status")).body["retry"]["max_attempts"] == 5
    assert (await api.get("/readyz")).status == 200

    if daemon.config_path.is_dir():
        daemon.config_path.rmdir()
    daemon.config_path.write_text(valid)
    assert await daemon.reload()
    assert (await api.event(payload="x" * 2000)).status == 202
    assert (daemon.metric(RELOADS, outcome="refused"), daemon.metric(RELOADS, outcome="done")) == (1, 1)


async def test_deliveries_continue_after_an_invalid_file(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The earlier CA file and networks still apply to requests after the failed reload."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon().start()
    daemon.config_path.write_text("[retry]\nmax_attemps = 3\n")
    assert not await daemon.reload()
    await flow.publish()
    await endpoint.received(1)


async def test_file_name_with_nul_character_is_rejected(make_daemon: MakeDaemon) -> None:
    """Python raises another exception for it than for a missing file; the reload is rejected the same way."""
    daemon = await make_daemon().start()
    daemon.configure(delivery={"ca_file": "a\0b"})
    assert not await daemon.reload()
    assert daemon.logged("delivery.ca_file")
