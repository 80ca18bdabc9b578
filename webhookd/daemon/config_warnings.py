"""Warnings about valid but risky configurations. `serve` logs them at start, and `check` prints them.

Running as root causes no warning: containers do, and the embedded PostgreSQL runs as another user then.
"""

import os
import stat
import tomllib
from pathlib import Path

from webhookd.core.dsn import has_password
from webhookd.core.settings import DatabaseSettings, Settings
from webhookd.db.server_facts import Facts


def settings_warnings(settings: Settings) -> list[str]:
    """Warn if a production instance would store its events in the embedded database by mistake."""
    if not settings.database.embedded or settings.delivery.local:
        return []
    how = (
        "set database.dsn or WEBHOOKD_DATABASE_DSN to use your own server, or `serve --local` for development"
    )
    return [f"using the embedded database, because no other is configured: {how}"]


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


def database_warnings(settings: DatabaseSettings, facts: Facts) -> list[str]:
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
