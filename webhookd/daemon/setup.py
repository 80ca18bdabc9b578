"""What an instance needs before its services start: its database, client options, and warnings.

A reload uses the same functions, and `restart_needed` names the keys that it cannot apply.
"""

import asyncio
import logging
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from webhookd.core.configuration import data_dir
from webhookd.core.errors import SchemaProblem
from webhookd.core.settings import DatabaseSettings, Settings, has_password, is_loopback_host
from webhookd.db import migrations
from webhookd.db.connection import ServerFacts
from webhookd.embedded.server import EmbeddedServer, running
from webhookd.local_certificate import LocalCertificate
from webhookd.outbound.addresses import AddressPolicy, IPAddress
from webhookd.outbound.client import VERIFICATION_CONNECTIONS, ClientOptions, trusted_tls

log = logging.getLogger(__name__)

KEEP_INTERVAL_SECONDS = 1.0
# Read once, at start. A change is reported and takes effect after a restart. All other settings are read at
# each use.
NEEDS_RESTART = (
    ("database", "dsn"),
    ("database", "data_dir"),
    ("database", "pool_size"),
    ("database", "auto_migrate"),
    ("database", "allow_unencrypted"),
    ("services", "enabled"),
    ("api", "listen"),
    ("api", "health_listen"),
)


@dataclass(frozen=True)
class Database:
    """Connection strings of an instance: to run, and to migrate."""

    dsn: str
    migrating_dsn: str
    embedded: EmbeddedServer | None = None

    async def fit(self, *, may_migrate: bool) -> None:
        """Migrate the schema if allowed; otherwise refuse an outdated one and name the command to run."""
        pending = await migrations.check(self.migrating_dsn)
        missing = ", ".join(pending.describe())
        if pending and not may_migrate:
            raise SchemaProblem(
                f"the database's schema is not up to date ({missing}): run `webhookd migrate`"
            )
        if pending:
            await migrations.migrate(self.migrating_dsn)
        if server := self.embedded:
            log.info(
                "embedded PostgreSQL %s is running in %s",
                server.version,
                server.folder,
                extra={
                    "joined": None if server.started else "already running",
                    "migrated": missing or None,
                    "connect_with": f"psql '{server.admin_dsn}'",
                },
            )
        elif pending:
            log.info("database migrated", extra={"migrated": missing})


async def keep_running(server: EmbeddedServer) -> None:
    """Restart the embedded server if it stops. A supervised service."""
    loop = asyncio.get_running_loop()
    while True:
        kept = loop.run_in_executor(None, server.ensure_running)
        try:
            await asyncio.shield(kept)
        except asyncio.CancelledError:
            # Wait for the thread, or it could start a server that the shutdown has just stopped.
            # shut_down() keeps that wait short: a recovery may take minutes.
            server.shut_down()
            await asyncio.wait([kept])
            raise
        await asyncio.sleep(KEEP_INTERVAL_SECONDS)


@contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    """Open the configured database for the length of the block."""
    dsn = settings.database.dsn
    if dsn:
        yield Database(dsn, dsn)
        return
    with running(data_dir(settings)) as server:
        yield Database(server.dsn, server.admin_dsn, server)


def client_options(settings: Settings, own_addresses: frozenset[tuple[IPAddress, int]]) -> ClientOptions:
    """Build the client's options. Everything that can fail happens here, before the swap."""
    delivery = settings.delivery
    return ClientOptions(
        policy=AddressPolicy.of(delivery.networks),
        tls=trusted_tls(*_ca_files(settings)),
        own_addresses=own_addresses,
        max_response_bytes=delivery.max_response_bytes,
        max_connections=delivery.concurrency + VERIFICATION_CONNECTIONS,
    )


def _ca_files(settings: Settings) -> Iterator[Path]:
    if settings.delivery.ca_file:
        yield Path(settings.delivery.ca_file)
    if settings.delivery.local:
        yield LocalCertificate.in_folder(data_dir(settings)).certificate_file


def restart_needed(old: Settings, new: Settings) -> list[str]:
    """Return the changed settings that are read only at start."""
    return [
        f"{section}.{key}"
        for section, key in NEEDS_RESTART
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key)
    ]


def settings_warnings(settings: Settings) -> list[str]:
    """Warn if a production instance would store its events in the embedded database by mistake."""
    if not settings.database.embedded or settings.delivery.local:
        return []
    how = (
        "set database.dsn or WEBHOOKD_DATABASE_DSN to use your own server, or `serve --local` for development"
    )
    return [f"using the embedded database, because no other is configured: {how}"]


def console_address(public_url: str, host: str, port: int) -> str:
    """Return the address of the console for a browser, at best the public one."""
    if public_url:
        return f"{public_url}/"
    address = ip_address(host)
    if address.is_unspecified:
        # No browser can connect to it, but one on this machine to the loopback address.
        address = ip_address("127.0.0.1" if address.version == 4 else "::1")  # noqa: PLR2004
    return f"http://[{address}]:{port}/" if address.version == 6 else f"http://{address}:{port}/"  # noqa: PLR2004


def console_warnings(settings: Settings) -> list[str]:
    """Warn if logins would cross a network in clear text."""
    url = urlsplit(settings.api.public_url)
    if url.scheme != "http" or is_loopback_host(url.hostname or ""):
        return []
    return [
        "api.public_url is not https: logins, links to portals and signing secrets can be read on the network"
    ]


def file_warnings(path: Path | None) -> list[str]:
    """Return warnings about the configuration file's permissions."""
    if path is None:
        return []
    try:
        found = path.stat()
        database = tomllib.loads(path.read_text("utf-8")).get("database", {})
    except (OSError, ValueError):  # removed or changed since; the next reload reports that
        return []
    warnings = []
    if found.st_mode & stat.S_IROTH and has_password(str(database.get("dsn", ""))):
        warnings.append(f"{path} contains the database password and all users can read it: chmod o-r {path}")
    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        warnings.append(f"users other than the owner can change {path}: chmod go-w {path}")
    if found.st_uid not in (0, os.geteuid()):
        warnings.append(f"{path} belongs to another user: chown it to root or to the user that runs webhookd")
    return warnings


def database_warnings(settings: DatabaseSettings, facts: ServerFacts) -> list[str]:
    """Return warnings about the server's durability and its connection limit."""
    warnings = []
    if facts.pooled and not facts.commits_are_durable:
        # Without a pooler, webhookd sets it in every session.
        warnings.append("synchronous_commit is off: a server crash can lose acknowledged events")
    if not facts.survives_a_power_cut:
        warnings.append("fsync is off: a power failure can destroy the database")
    needed = settings.pool_size + 1
    left = facts.connections - facts.connections_in_use
    if not facts.pooled and needed > left:
        warnings.append(
            f"this instance may need {needed} connections (database.pool_size, and one for LISTEN), but only "
            f"{max(left, 0)} of the server's {facts.connections} are free: some requests will wait or fail"
        )
    return warnings
