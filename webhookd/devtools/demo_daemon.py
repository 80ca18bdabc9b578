"""The demo's own webhookd: with an embedded PostgreSQL, and nothing of the user's own settings.

Whatever ends the demo, short of kill -9, ends both.
"""

import os
from pathlib import Path
from typing import Final

from webhookd.devtools.own_daemon import OwnDaemon
from webhookd.embedded.server import running


class DemoDaemon(OwnDaemon):
    """In a folder of the demo's own."""

    def __init__(self, folder: Path) -> None:
        self.data_dir: Final = folder / "data"
        # Named and empty: none of the user's is looked for.
        configuration = folder / "webhookd.toml"
        configuration.touch()
        others = {name: value for name, value in os.environ.items() if not name.startswith("WEBHOOKD_")}
        own = {
            "WEBHOOKD_DATABASE_DATA_DIR": str(self.data_dir),
            "WEBHOOKD_SERVICES_POLL_INTERVAL_SECONDS": "0.2",
            "WEBHOOKD_LOG_FORMAT": "json",
        }
        super().__init__(folder, "demo", configuration, others | own)

    def _stop(self) -> bool:
        """In order, which stops PostgreSQL too."""
        in_order = super()._stop()
        if not in_order and (self.data_dir / "pgdata").is_dir():
            with running(self.data_dir):
                pass  # a daemon that was killed leaves it running; the last to leave stops it
        return in_order
