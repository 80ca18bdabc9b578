"""The PostgreSQL of a run: the newest found, durable, with the same settings for every contender."""

import re
from pathlib import Path

from tests.support.installations import installation_near
from tests.support.postgres import LocalServer

NEWEST = 99
# What an administrator of a machine of this size would set first. Durability is as PostgreSQL's defaults have
# it: fsync, synchronous_commit and full_page_writes are on, by LocalServer.
SETTINGS = {
    "shared_buffers": "1GB",
    "effective_cache_size": "4GB",
    "maintenance_work_mem": "256MB",
    "wal_buffers": "16MB",
    "min_wal_size": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "random_page_cost": "1.1",
    # Of a statement that is logged to be counted, the text alone.
    "log_parameter_max_length": "0",
}
# One line begins with it for each statement of a login whose log_statement is on; further lines are indented.
STATEMENT = re.compile(rb"^[^\t\n]*LOG:  (?:execute|statement)\b", re.MULTILINE)


class DurableServer(LocalServer):
    """Started once for a run. Its log counts statements, for the wheel has no pg_stat_statements."""

    def __init__(self) -> None:
        super().__init__(installation_near(NEWEST), durable=True)

    @property
    def version(self) -> str:
        return self._installation.version

    @property
    def log_path(self) -> Path:
        assert self._folder is not None, "the server is not running"
        return self._folder / "log"

    def log_bytes(self) -> int:
        """Where the log ends now."""
        return self.log_path.stat().st_size

    def statements_since(self, offset: int) -> int:
        """How many statements were logged since the log ended there."""
        with self.log_path.open("rb") as log:
            log.seek(offset)
            return count_statements(log.read())

    def _initialize(self, folder: Path) -> None:
        super()._initialize(folder)
        with (folder / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in SETTINGS.items())


def count_statements(log: bytes) -> int:
    """How many statements a log tells of."""
    return len(STATEMENT.findall(log))
