"""A file that cannot be used changes nothing but a log line and a metric; the next good one is taken."""

from collections.abc import Callable

import pytest

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.flow.test_scenarios import subscribed
from tests.support.api import tokens
from tests.support.daemon import RELOADS, DaemonProcess
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow

Spoil = Callable[[DaemonProcess], object]


def text(change: Callable[[str], str]) -> Spoil:
    """Spoil the file's text."""
    return lambda daemon: daemon.config_path.write_text(change(daemon.config_path.read_text()))


def setting(section: str, **values: object) -> Spoil:
    """Spoil a setting."""
    return lambda daemon: daemon.configure(**{section: values})


def no_certificate(daemon: DaemonProcess) -> None:
    """An authority's file without one."""
    path = daemon.folder / "empty.pem"
    path.write_text("nothing\n")
    daemon.configure(delivery={"ca_file": str(path)})


def folder_in_its_place(daemon: DaemonProcess) -> None:
    """Where the file was."""
    daemon.config_path.unlink()
    daemon.config_path.mkdir()


# How the file is spoilt, and what the log must say of it.
SPOILT: dict[str, tuple[Spoil, str]] = {
    "syntax": (text(lambda good: good + "[retry\n"), "is not TOML"),
    "a key twice": (text(lambda good: good + "[log]\n"), "is not TOML"),
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
    "no such network": (setting("delivery", allow_networks=["127.0.0.1/8"]), "delivery.allow_networks"),
    "token without a digest": (
        setting("api", tokens=[{"name": "a", "sha256": "a", "scopes": ["read"]}]),
        "api.tokens",
    ),
    "token twice": (
        setting("api", tokens=tokens({"a": ["read"]}) * 2),
        "api.tokens: the name a is used twice",
    ),
    "no file": (lambda daemon: daemon.config_path.unlink(), "No such file"),
    "folder": (folder_in_its_place, "Is a directory"),
    "no authorities": (setting("delivery", ca_file="/nowhere/ca.pem"), "delivery.ca_file"),
    "no certificate": (no_certificate, "delivery.ca_file"),
}


@pytest.mark.parametrize("how", SPOILT)
async def test_a_bad_file_changes_nothing(how: str, make_api: MakeApi) -> None:
    """Told in one line, shown by the metric; no setting beside the mistake is taken; a good file mends it."""
    api = await make_api(api={"max_payload_bytes": 1024})
    daemon = api.daemon
    spoil, words = SPOILT[how]
    # A change that would be seen, were the file taken in part.
    daemon.configure(api={"max_payload_bytes": 4096}, retry={"max_attempts": 7})
    good = daemon.config_path.read_text()
    spoil(daemon)
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
    daemon.config_path.write_text(good)
    assert await daemon.reload()
    assert (await api.event(payload="x" * 2000)).status == 202
    assert (daemon.metric(RELOADS, outcome="refused"), daemon.metric(RELOADS, outcome="done")) == (1, 1)


async def test_deliveries_go_on_under_a_bad_file(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """What was trusted and allowed before the mistake still is, for a request that comes after it."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon().start()
    daemon.config_path.write_text("[retry]\nmax_attemps = 3\n")
    assert not await daemon.reload()
    await flow.publish()
    await endpoint.received(1)


async def test_a_file_name_that_is_none_is_refused(make_daemon: MakeDaemon) -> None:
    """A NUL in it is an error of another kind than a missing file, and no worse."""
    daemon = await make_daemon().start()
    daemon.configure(delivery={"ca_file": "a\0b"})
    assert not await daemon.reload()
    assert daemon.logged("delivery.ca_file")
