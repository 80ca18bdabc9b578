"""Notifies systemd (sd_notify) of READY, RELOADING, STOPPING and WATCHDOG."""

import asyncio
import logging
import os
import socket
import time

log = logging.getLogger(__name__)


def notify(*lines: str) -> None:
    """Send a state; does nothing without NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            sender.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            log.warning("could not notify systemd of %s: %s", lines[0], error)


def reloading() -> None:
    """Report that a reload has started; READY ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def watchdog_interval_seconds() -> float:
    """Half of the interval that systemd expects; 0 if it expects none from this process."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return 0
    return int(os.environ.get("WATCHDOG_USEC", "0")) / 2_000_000


async def watchdog() -> None:
    """Send WATCHDOG as long as the event loop runs. A supervised service."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(watchdog_interval_seconds())
