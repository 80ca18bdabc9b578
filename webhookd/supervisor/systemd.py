"""Tells systemd how we do, where it listens: READY, RELOADING, STOPPING, WATCHDOG."""

import asyncio
import os
import socket
import time


def notify(*lines: str) -> None:
    """Send a state; nothing happens where no systemd listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto("\n".join(lines).encode(), address)


def reloading() -> None:
    """Say that a reload has begun; READY ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


async def watchdog() -> None:
    """Show that the loop turns, twice as often as systemd asks for. A supervised service."""
    interval_seconds = int(os.environ.get("WATCHDOG_USEC", "0")) / 2_000_000
    while interval_seconds:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_seconds)
