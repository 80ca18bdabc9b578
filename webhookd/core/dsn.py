"""What a DSN says of itself: where it leads, with a password or not, encrypted or not.

Pure. Of a bad one nothing is said: that is the driver's to tell.
"""

import ipaddress
import re
from urllib.parse import parse_qs, unquote, urlsplit


def is_loopback_host(host: str) -> bool:
    """Whether only this machine answers to it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unencrypted_hosts(dsn: str) -> list[str]:
    """Other machines to which it asks for a connection without TLS."""
    netloc, query = _parts(dsn)
    if query.get("sslmode", [""])[-1] != "disable":
        return []
    return [host for host in _hosts(netloc, query) if not is_loopback_host(host)]


def has_password(dsn: str) -> bool:
    """Whether who reads it can log in."""
    netloc, query = _parts(dsn)
    return ":" in netloc.rpartition("@")[0] or "password" in query


def shown(dsn: str) -> str:
    """Where it leads and as whom, for a person; nothing of it that is secret."""
    netloc, query = _parts(dsn)
    user = netloc.rpartition("@")[0].partition(":")[0] or "".join(query.get("user", [])[:1])
    hosts = netloc.rpartition("@")[2] or ",".join(query.get("host", [])) or "this machine"
    return f"{unquote(hosts)} as {unquote(user)}" if user else unquote(hosts)


def with_database(dsn: str, name: str) -> str:
    """The same server and login, another database: that of the path comes before all others."""
    parts = urlsplit(dsn)
    query = f"?{parts.query}" if parts.query else ""
    # Not urlunsplit: without a host it leaves the slashes away.
    return f"{parts.scheme}://{parts.netloc}/{name}{query}"


def _parts(dsn: str) -> tuple[str, dict[str, list[str]]]:
    try:
        parts = urlsplit(dsn)
        return parts.netloc, parse_qs(parts.query)
    except ValueError:
        return "", {}


def _hosts(netloc: str, query: dict[str, list[str]]) -> list[str]:
    """Names and addresses of machines; a socket's folder is none."""
    named = [re.sub(r":\d*$", "", part) for part in netloc.rpartition("@")[2].split(",")]
    asked = [part for value in query.get("host", []) for part in value.split(",")]
    hosts = [unquote(host).strip("[]") for host in (*named, *asked)]
    return [host for host in hosts if host and not host.startswith("/")]
