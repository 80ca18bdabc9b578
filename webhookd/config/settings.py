"""What there is to set, with defaults. webhookd.toml at the top of the repository says why.

Frozen: a reload makes a new object and swaps it in.
"""

import msgspec


class DatabaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the database is."""

    dsn: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every section of webhookd.toml."""

    database: DatabaseSettings = DatabaseSettings()
