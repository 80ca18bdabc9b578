"""Notifications to systemd: ready, reloading, stopping, watchdog. The daemon does not depend on them."""

import secrets
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.flow.conftest import MakeDaemon
from tests.support.daemon import DaemonProcess
from tests.support.systemd import NotifySocket
from tests.support.wire import Wire

FORMS = [
    "path",
    pytest.param("abstract", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux only")),
]


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address for the socket: an abstract name, or a path (short: the limit is about 100 bytes)."""
    if getattr(request, "param", "path") == "abstract":
        yield f"@webhookd-test-{secrets.token_hex(8)}"
        return
    with tempfile.TemporaryDirectory(prefix="webhookd-") as folder:
        yield str(Path(folder) / "notify")


@pytest.fixture
async def systemd(address: str) -> AsyncIterator[NotifySocket]:
    """A fake systemd that receives notifications."""
    systemd = NotifySocket(address)
    await systemd.open()
    yield systemd
    systemd.close()


@pytest.fixture
def daemon(make_daemon: MakeDaemon, address: str) -> DaemonProcess:
    """A daemon, not yet started, that notifies that address."""
    daemon = make_daemon()
    daemon.environment["NOTIFY_SOCKET"] = address
    return daemon


@pytest.mark.parametrize("address", FORMS, indirect=True)
async def test_start_reload_and_stop_are_notified(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """READY, RELOADING with the monotonic time (also if the reload fails), STOPPING; nothing else."""
    await daemon.start()
    await systemd.received(1)
    reloads: list[str] = []
    for max_attempts in (7, 0):
        daemon.configure(retry={"max_attempts": max_attempts})
        before = time.monotonic_ns() // 1000
        assert await daemon.reload() == (max_attempts > 0)
        *_, reloading, _ = await systemd.received(2 * len(reloads) + 3)
        state, usec = reloading.split("\n")
        name, number = usec.split("=")
        assert (state, name) == ("RELOADING=1", "MONOTONIC_USEC")
        assert before <= int(number) <= time.monotonic_ns() // 1000
        reloads.append(reloading)
    daemon.sigterm()
    assert await daemon.ended() == 0
    await systemd.received(6)
    assert systemd.messages == ["READY=1", reloads[0], "READY=1", reloads[1], "READY=1", "STOPPING=1"]


async def test_not_ready_before_the_services_run(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """While the API cannot listen, READY is not sent."""
    with socket.create_server(("127.0.0.1", daemon.port)):
        daemon.launch()
        await daemon.until(lambda: daemon.process.poll() is not None or daemon.logged("api failed"), "ended")
        assert "READY=1" not in systemd.messages


async def test_sighup_works_as_soon_as_ready_is_sent(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """Before READY, SIGHUP would end the process."""
    systemd.on_message = lambda message: (
        daemon.sighup() if message == "READY=1" and len(systemd.messages) == 1 else None
    )
    await daemon.start()
    await daemon.until(lambda: daemon.logged("configuration reloaded"), "reloaded")


async def test_watchdog_is_notified(make_daemon: MakeDaemon, systemd: NotifySocket, wire: Wire) -> None:
    """As long as the event loop runs, with or without the database."""
    daemon = make_daemon(database={"dsn": wire.dsn})
    daemon.environment |= {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "100000"}
    await daemon.start()
    await systemd.received(3, "WATCHDOG=1")
    wire.cut()
    await daemon.until(lambda: daemon.get("/readyz")[0] == 503, "without the database")
    notified = len(await systemd.received(0, "WATCHDOG=1"))
    await systemd.received(notified + 3, "WATCHDOG=1")


async def test_no_watchdog_without_watchdog_usec(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """Without WATCHDOG_USEC there are no notifications and no restarts."""
    await daemon.start()
    await daemon.reload()
    assert not await systemd.received(0, "WATCHDOG")
    assert daemon.metric("webhookd_service_restarts_total") == 0


async def test_no_watchdog_for_another_process(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """WATCHDOG_PID names another process."""
    daemon.environment |= {"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}
    await daemon.start()
    await daemon.reload()
    assert not await systemd.received(0, "WATCHDOG")


@pytest.mark.parametrize("address", FORMS, indirect=True)
async def test_unread_socket_is_ignored(daemon: DaemonProcess, address: str) -> None:
    """A socket without a reader, or an abstract name that does not exist, has no effect."""
    if not address.startswith("@"):
        gone = NotifySocket(address)
        await gone.open()
        gone.close()
    await daemon.start()
    assert await daemon.reload()
    daemon.sigterm()
    assert await daemon.ended() == 0


async def test_missing_socket_is_ignored(daemon: DaemonProcess) -> None:
    """A path that does not exist, as in a container with systemd's environment but not its files."""
    await daemon.start()
    assert await daemon.reload()
