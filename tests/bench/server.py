"""The PostgreSQL of a run: durable, with the same settings for every contender."""

import re
from pathlib import Path

from tests.support.postgres import LocalServer
from webhookd.embedded.installation import Installation

# The first settings that an administrator of such a machine would change. Durability is PostgreSQL's default:
# LocalServer leaves fsync, synchronous_commit and full_page_writes on.
SETTINGS = {
    "shared_buffers": "1GB",
    "effective_cache_size": "4GB",
    "maintenance_work_mem": "256MB",
    "wal_buffers": "16MB",
    "min_wal_size": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "random_page_cost": "1.1",
    # Statements are logged to be counted; their parameters are not needed.
    "log_parameter_max_length": "0",
}
# The first line of each statement of a login with log_statement on; further lines are indented.
STATEMENT = re.compile(rb"^[^\t\n]*LOG:  (?:execute|statement)\b", re.MULTILINE)


class DurableServer(LocalServer):
    """Started once per run. Statements are counted in its log: the wheel has no pg_stat_statements."""

    def __init__(self, installation: Installation) -> None:
        super().__init__(installation, durable=True)

    @property
    def log_path(self) -> Path:
        assert self._folder is not None, "the server is not running"
        return self._folder / "log"

    def log_bytes(self) -> int:
        """The end of the log now."""
        return self.log_path.stat().st_size

    def statements_since(self, position: int) -> int:
        """The number of statements logged since this position of the log."""
        with self.log_path.open("rb") as log:
            log.seek(position)
            return count_statements(log.read())

    def _initialize(self, folder: Path) -> None:
        super()._initialize(folder)
        with (folder / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in SETTINGS.items())


def count_statements(log: bytes) -> int:
    """Count the statements in a log."""
    return len(STATEMENT.findall(log))
