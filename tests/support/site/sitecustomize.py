"""Runs inside a daemon under test, before its code: DNS names come from a table, and dials are recorded.

Reads names.json in $TEST_NAMES_FOLDER at every lookup; writes lookups.jsonl and dials.jsonl there. A dial
beyond loopback is recorded and rejected: if the daemon's address check fails, the test fails and nothing is
sent.
"""

import ipaddress
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["TEST_NAMES_FOLDER"])
NOT_REPLACED = ("127.0.0.1", "localhost")
SILENCE_POLL_SECONDS = 0.02

_getaddrinfo = socket.getaddrinfo


def look_up(host: Any, port: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Resolve from the table. A null entry blocks until it has an answer; a missing entry is an error."""
    if host in NOT_REPLACED:
        return _getaddrinfo(host, port, *arguments, **options)
    str(host).encode("idna")  # like the real function, which raises UnicodeError for an invalid name
    _record("lookups.jsonl", host)
    while (answers := _table().get(host, [])) is None:
        time.sleep(SILENCE_POLL_SECONDS)
    if not answers:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    # The answers are numeric, so the real function converts them without a DNS query.
    return [info for answer in answers for info in _getaddrinfo(answer, port, type=socket.SOCK_STREAM)]


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Record dials; Python calls this audit hook before any code connects a socket."""
    if event not in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        return
    address = arguments[1]
    if isinstance(address, tuple):
        host, port = address[:2]
        _record("dials.jsonl", [host, port])
        if not _is_loopback(str(host)):
            raise AssertionError(f"a dial beyond loopback: {host}")


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _table() -> dict[str, list[str] | None]:
    table: dict[str, list[str] | None] = json.loads((FOLDER / "names.json").read_text())
    return table


def _record(file: str, value: object) -> None:
    with (FOLDER / file).open("a") as lines:
        lines.write(json.dumps(value) + "\n")


socket.getaddrinfo = look_up
sys.addaudithook(audit)
