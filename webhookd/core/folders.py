"""The folder where this machine's webhookd keeps what is its own. Reads settings; makes nothing."""

import os
import sys
from pathlib import Path

import platformdirs

from webhookd.core.errors import ConfigurationError
from webhookd.core.settings import Settings


def data_dir(settings: Settings) -> Path:
    """Where the embedded server and the local authority are: absolute, perhaps not there yet."""
    named = settings.database.data_dir
    if not named:
        return _default()
    if "\0" in named:
        raise ConfigurationError("database.data_dir cannot be used: there is a NUL in it")
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigurationError(f"database.data_dir cannot be used: {error}") from error


def _default() -> Path:
    """Root's is outside of its home: PostgreSQL refuses root, and the account it gets cannot enter there."""
    if os.geteuid() != 0:
        return platformdirs.user_data_path("webhookd", appauthor=False)
    if sys.platform == "linux":
        return Path("/var/lib/webhookd")
    return platformdirs.site_data_path("webhookd", appauthor=False)
