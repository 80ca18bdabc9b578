"""Runs inside a daemon under test, before it: names come from a table, and every dial is written down.

Reads names.json in $TEST_NAMES_FOLDER at every lookup; writes asked.jsonl and dials.jsonl there. A dial
beyond loopback is written down and refused: if the daemon's guard fails, the test does, and nothing is sent.
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
PASSED_ON = ("127.0.0.1", "localhost")
SILENCE_POLL_SECONDS = 0.02

_getaddrinfo = socket.getaddrinfo


def look_up(host: Any, port: Any, *arguments: Any, **options: Any) -> list[Any]:
    """As the table says: addresses; null is silence until the table has an answer; no entry, no such name."""
    if host in PASSED_ON:
        return _getaddrinfo(host, port, *arguments, **options)
    str(host).encode("idna")  # as the real one: a name too odd raises a bare UnicodeError
    _write_down("asked.jsonl", host)
    while (answers := _table().get(host, [])) is None:
        time.sleep(SILENCE_POLL_SECONDS)
    if not answers:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    # Numeric, so that the real one makes the answers and asks nobody.
    return [info for answer in answers for info in _getaddrinfo(answer, port, type=socket.SOCK_STREAM)]


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's own notice of a socket about to be connected, whoever does it."""
    if event not in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        return
    address = arguments[1]
    if isinstance(address, tuple):
        host, port = address[:2]
        _write_down("dials.jsonl", [host, port])
        if not _is_loopback(str(host)):
            raise AssertionError(f"a dial beyond loopback: {host}")


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _table() -> dict[str, list[str] | None]:
    table: dict[str, list[str] | None] = json.loads((FOLDER / "names.json").read_text())
    return table


def _write_down(file: str, value: object) -> None:
    with (FOLDER / file).open("a") as lines:
        lines.write(json.dumps(value) + "\n")


socket.getaddrinfo = look_up
sys.addaudithook(watch)
