"""What is allowed, and probably not meant: said by `serve` when it starts, and by `check`.

Running as root is not among them: containers do, and the PostgreSQL that root starts runs as another.
"""

import os
import stat
import tomllib
from pathlib import Path

from webhookd.core.dsn import has_password
from webhookd.core.settings import DatabaseSettings
from webhookd.db.server_facts import Facts


def of_file(path: Path | None) -> list[str]:
    """The configuration file, which was read: who else may read or write it."""
    if path is None:
        return []
    try:
        found = path.stat()
        database = tomllib.loads(path.read_text("utf-8")).get("database", {})
    except (OSError, ValueError):  # gone or changed since; the next reload tells
        return []
    concerns = []
    if found.st_mode & stat.S_IROTH and has_password(str(database.get("dsn", ""))):
        concerns.append(f"{path} holds the database's password, and everybody may read it: chmod o-r {path}")
    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        concerns.append(f"others than the owner of {path} may change it: chmod go-w {path}")
    if found.st_uid not in (0, os.geteuid()):
        concerns.append(f"{path} belongs to another user, who may change it: chown it to root or to this one")
    return concerns


def of_database(settings: DatabaseSettings, facts: Facts) -> list[str]:
    """The server, and this instance's share of it."""
    concerns = []
    if facts.pooled and not facts.commits_are_durable:
        # Without a pooler every session of ours sets it.
        concerns.append("synchronous_commit is off: a crash of the server loses what was acknowledged")
    if not facts.survives_a_power_cut:
        concerns.append("fsync is off: a power cut may leave nothing of the database")
    needed = settings.pool_size + 1
    left = facts.connections - facts.connections_in_use
    if not facts.pooled and needed > left:
        concerns.append(
            f"this instance may need {needed} connections (database.pool_size, and one to listen), and "
            f"{max(left, 0)} of the server's {facts.connections} are left: calls will wait, and some fail"
        )
    return concerns
