"""The daemon as a process: its log lines, its notifications to systemd, its garbage collector.

The log has JSON for machines, or readable lines for a terminal. Fields are passed with `extra=`.
"""

import asyncio
import gc
import json
import logging
import os
import socket
import sys
import time
from typing import Literal

log = logging.getLogger(__name__)

# The attributes of every record; all others were passed with `extra=`.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_log(level: str, form: Literal["auto", "text", "json"]) -> None:
    """Set up the root logger, at start and at each reload."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)

    converter = staticmethod(time.gmtime)


class TextFormatter(logging.Formatter):
    """Writes time, level, message and fields. The address of the console has a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        values = _fields(record)
        console = values.pop("console", None)
        fields = " ".join(f"{key}={value}" for key, value in values.items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():7} {record.getMessage()}"
        if fields:
            line += f"  {fields}"
        if console:
            line += f"\nconsole: {console}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        key: value for key, value in record.__dict__.items() if key not in _STANDARD and value is not None
    }


def notify_systemd(*lines: str) -> None:
    """Send a state (sd_notify); does nothing without NOTIFY_SOCKET."""
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


def watchdog_interval_seconds() -> float:
    """Half of the interval that systemd expects; 0 if it expects none from this process."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return 0
    return int(os.environ.get("WATCHDOG_USEC", "0")) / 2_000_000


async def watchdog() -> None:
    """Send WATCHDOG as long as the event loop runs. A supervised service."""
    while True:
        notify_systemd("WATCHDOG=1")
        await asyncio.sleep(watchdog_interval_seconds())


def tune_garbage_collector() -> None:
    """Collect cycles less often, and exclude long-lived objects such as modules, routes and services.

    A request creates a few hundred objects and hardly any cycle. With the defaults, collection took a tenth
    of the CPU time of a loop that only sends POSTs. What is collected later is a few megabytes at most.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
