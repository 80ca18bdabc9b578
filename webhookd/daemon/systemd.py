"""Tells systemd how we do, where it listens: READY, RELOADING, STOPPING, WATCHDOG."""

import asyncio
import logging
import os
import socket
import time

log = logging.getLogger(__name__)


def notify(*lines: str) -> None:
    """Send a state; nothing happens where no systemd listens."""
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
            log.warning("systemd was not told %s: %s", lines[0], error)


def reloading() -> None:
    """Say that a reload has begun; READY ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def watchdog_interval_seconds() -> float:
    """Half of what systemd asks for; nothing where it does not ask, or asks another process."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return 0
    return int(os.environ.get("WATCHDOG_USEC", "0")) / 2_000_000


async def watchdog() -> None:
    """Show that the loop turns. A supervised service."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(watchdog_interval_seconds())
