"""asyncpg's exceptions in, ours out: the layers above never see a driver's error."""

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

# By SQLSTATE and not by class: asyncpg knows no class for a code of ours and shows it as an unknown error.
# 08: the connection; 3D: no such database; 53: out of connections, memory or disk; 57: shut down, cancelled;
# 58: the server's own files.
_UNAVAILABLE_CLASSES = ("08", "3D", "53", "57", "58")
_LOGIN_CLASS = "28"
_NOT_WRITABLE = ("25006", "25P03")  # a standby, or a session that sat in a transaction for too long
_DISK_FULL = "53100"
_BUSY = ("40001", "40P01", "55P03")  # a conflict, a deadlock, a lock not got in time


@contextmanager
def translated() -> Iterator[None]:
    """Raise what the body raises as an error of ours; misuse of the driver goes through as the bug it is."""
    try:
        yield
    except asyncpg.PostgresError as error:
        # Without its cause: that prints DETAIL, which may be a row with a secret in it.
        raise _of_postgres(error) from None
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
        if isinstance(error, asyncpg.ClientConfigurationError):
            raise ConfigurationError(f"database.dsn cannot be used: {error}") from error
        if not isinstance(error, OSError) and not _lost_connection(error):  # a TimeoutError is one
            raise
        raise DatabaseUnavailable(f"database unavailable: {plainly(error)}") from error


def _of_postgres(error: asyncpg.PostgresError) -> WebhookdError:
    sqlstate: str = error.sqlstate or ""
    message = error.message or str(error)  # a connection that ended has none from the server
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


def plainly(error: Exception) -> str:
    """What happened to the connection, without the driver's words for it."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, asyncpg.InternalClientError):
        return "the connection was lost"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: is PostgreSQL running there?"
    if isinstance(error, socket.gaierror):
        return f"its host is not known: {error.strerror} (an @ in a password is written %40)"
    return str(error) or type(error).__name__


def _lost_connection(error: asyncpg.InterfaceError | asyncpg.InternalClientError) -> bool:
    """Asyncpg reports a connection that is gone as misuse of its interface, told apart by its words alone.

    Or as its own confusion: between the server's goodbye on an idle connection and the end of the socket it
    is in no state to be asked ("cannot switch to state 12; another operation (2) is in progress").
    """
    if isinstance(error, asyncpg.InternalClientError):
        # In a failover, for a moment, no host is the one that target_session_attrs asks for.
        wanted = isinstance(error, asyncpg.TargetServerAttributeNotMatched)
        return wanted or "cannot switch to state" in str(error)
    return "connection" in str(error) and "closed" in str(error)
