"""Reads parts of a DSN: its hosts, whether it has a password, whether it disables TLS.

Pure. An invalid DSN has no parts here; the driver reports the error.
"""

import ipaddress
import re
from urllib.parse import parse_qs, unquote, urlsplit


def is_loopback_host(host: str) -> bool:
    """Return whether the host is this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unencrypted_hosts(dsn: str) -> list[str]:
    """Return the other machines that the DSN connects to with sslmode=disable."""
    netloc, query = _parts(dsn)
    if query.get("sslmode", [""])[-1] != "disable":
        return []
    return [host for host in _hosts(netloc, query) if not is_loopback_host(host)]


def has_password(dsn: str) -> bool:
    """Return whether the DSN contains a password."""
    netloc, query = _parts(dsn)
    return ":" in netloc.rpartition("@")[0] or "password" in query


def without_password(dsn: str) -> str:
    """Return the hosts and the user of a DSN, for people to read."""
    netloc, query = _parts(dsn)
    user = netloc.rpartition("@")[0].partition(":")[0] or "".join(query.get("user", [])[:1])
    hosts = netloc.rpartition("@")[2] or ",".join(query.get("host", [])) or "this machine"
    return f"{unquote(hosts)} as {unquote(user)}" if user else unquote(hosts)


def with_database(dsn: str, name: str) -> str:
    """Return the DSN for another database of the server. The path overrides a `dbname` in the query."""
    parts = urlsplit(dsn)
    query = f"?{parts.query}" if parts.query else ""
    # Not urlunsplit: without a host it drops the slashes.
    return f"{parts.scheme}://{parts.netloc}/{name}{query}"


def _parts(dsn: str) -> tuple[str, dict[str, list[str]]]:
    try:
        parts = urlsplit(dsn)
        return parts.netloc, parse_qs(parts.query)
    except ValueError:
        return "", {}


def _hosts(netloc: str, query: dict[str, list[str]]) -> list[str]:
    """Return host names and addresses, without folders of sockets."""
    in_netloc = [re.sub(r":\d*$", "", part) for part in netloc.rpartition("@")[2].split(",")]
    in_query = [part for value in query.get("host", []) for part in value.split(",")]
    hosts = [unquote(host).strip("[]") for host in (*in_netloc, *in_query)]
    return [host for host in hosts if host and not host.startswith("/")]
