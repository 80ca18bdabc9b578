"""Translates asyncpg's exceptions to those of core.errors: the layers above see no driver errors."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from webhookd.core.errors import (
    ConfigurationError,
    DatabaseBusy,
    DatabaseFault,
    DatabaseFull,
    DatabaseUnavailable,
    Refusal,
    Refused,
    WebhookdError,
)

_REFUSALS = {refusal.value: refusal for refusal in Refusal}

# By SQLSTATE and not by exception class: asyncpg shows our own codes as unknown errors.
# 08: connection; 3D: no such database; 53: out of connections, memory or disk; 57: shutdown or cancelled;
# 58: the server's own files.
_UNAVAILABLE_CLASSES = ("08", "3D", "53", "57", "58")
_LOGIN_CLASS = "28"
_NOT_WRITABLE = ("25006", "25P03")  # a standby, or idle in a transaction for too long
_DISK_FULL = "53100"
_BUSY = ("40001", "40P01", "55P03")  # serialization failure, deadlock, lock timeout


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors raised in the block. Misuse of the driver is a bug and stays as it is."""
    try:
        yield
    except asyncpg.PostgresError as error:
        # Without its cause: that prints DETAIL, which may contain a row with a secret.
        raise _of_postgres(error) from None
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
        if isinstance(error, asyncpg.ClientConfigurationError):
            raise ConfigurationError(f"database.dsn is invalid: {error}") from error
        if not isinstance(error, OSError) and not _lost_connection(error):  # TimeoutError is an OSError
            raise
        raise DatabaseUnavailable(f"database unavailable: {describe(error)}") from error


def _of_postgres(error: asyncpg.PostgresError) -> WebhookdError:
    sqlstate: str = error.sqlstate or ""
    message = error.message or str(error)  # empty if the connection was lost
    if sqlstate in _REFUSALS:
        return Refused(_REFUSALS[sqlstate], message, error.detail, error.hint)
    if sqlstate[:2] == _LOGIN_CLASS:
        return DatabaseUnavailable(f"the database refused this login: {message}")
    if sqlstate == _DISK_FULL:
        return DatabaseFull(f"database unavailable: {message}")
    if sqlstate[:2] in _UNAVAILABLE_CLASSES or sqlstate in _NOT_WRITABLE:
        return DatabaseUnavailable(f"database unavailable: {message}")
    if sqlstate in _BUSY:
        return DatabaseBusy(f"database busy: {message}")
    return DatabaseFault(f"unexpected database error {sqlstate}: {message}")


def describe(error: Exception) -> str:
    """Describe a connection error without the driver's wording."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, asyncpg.InternalClientError):
        return "the connection was lost"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: is PostgreSQL running there?"
    if isinstance(error, socket.gaierror):
        return f"unknown host: {error.strerror} (write an @ in a password as %40)"
    return str(error) or type(error).__name__


def _lost_connection(error: asyncpg.InterfaceError | asyncpg.InternalClientError) -> bool:
    """Detect a lost connection that asyncpg reports as misuse of its interface; only the text tells.

    After the server's shutdown message on an idle connection, until the socket closes, asyncpg raises
    "cannot switch to state 12; another operation (2) is in progress".
    """
    if isinstance(error, asyncpg.InternalClientError):
        # During a failover, for a moment, no host matches target_session_attrs.
        no_match = isinstance(error, asyncpg.TargetServerAttributeNotMatched)
        return no_match or "cannot switch to state" in str(error)
    return "connection" in str(error) and "closed" in str(error)
