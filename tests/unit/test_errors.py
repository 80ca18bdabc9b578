"""Errors: schema/ and Python agree on the codes, and driver errors are translated correctly.

Reads schema/ as text and builds the driver's errors by hand: no database is needed.
"""

import re
from pathlib import Path

import asyncpg
import pytest

from tests.support.database import SCHEMA_ROLES
from webhookd.core.errors import (
    ConfigurationError,
    DatabaseBusy,
    DatabaseFault,
    DatabaseFull,
    DatabaseUnavailable,
    Refusal,
    Refused,
    SchemaProblem,
    WebhookdError,
)
from webhookd.db.connection import translated

SCHEMA = Path(__file__).resolve().parents[2] / "schema"


def schema_texts() -> list[str]:
    """Return the text of every SQL file of schema/."""
    texts = [path.read_text("utf-8") for path in sorted(SCHEMA.rglob("*.sql"))]
    assert texts, "there is a schema"
    return texts


def of_postgres(sqlstate: str, **fields: str) -> asyncpg.PostgresError:
    """Return the error that asyncpg raises for a server's message."""
    error = asyncpg.PostgresError.new({"C": sqlstate, "M": "said the server", **fields})
    assert isinstance(error, asyncpg.PostgresError)
    return error


def test_schema_raises_exactly_the_refusals() -> None:
    """Each WH SQLSTATE that schema/ raises is a Refusal, and each Refusal is raised."""
    raised = {code for text in schema_texts() for code in re.findall(r"errcode = '(WH[^']*)'", text)}
    assert raised == {refusal.value for refusal in Refusal}


def test_schema_mentions_only_raised_refusals() -> None:
    """A code that is caught, or mentioned in a comment, is also raised."""
    named = {code for text in schema_texts() for code in re.findall(r"\bWH[0-9A-Z]{3}\b", text)}
    assert named == {refusal.value for refusal in Refusal}


def test_test_bed_has_the_roles_of_the_schema() -> None:
    """The roles that the tests expect on a server are those of roles.sql."""
    arrays = re.findall(r"array\[([^\]]+)\]", (SCHEMA / "roles.sql").read_text("utf-8"))
    made = [name for array in arrays for name in re.findall(r"'([a-z_]+)'", array)]
    assert sorted(made) == sorted(SCHEMA_ROLES)


@pytest.mark.parametrize("refusal", Refusal)
def test_refusal_keeps_message_detail_and_hint(refusal: Refusal) -> None:
    """The SQLSTATE of a database function becomes Refused, with its message, detail and hint."""
    with pytest.raises(Refused) as caught, translated():
        raise of_postgres(refusal.value, D="the detail", H="the hint")
    error = caught.value
    assert (error.refusal, str(error), error.detail, error.hint) == (
        refusal,
        "said the server",
        "the detail",
        "the hint",
    )


@pytest.mark.parametrize(
    "error",
    [
        of_postgres("08006"),
        of_postgres("28P01"),
        of_postgres("3D000"),
        of_postgres("53300"),
        of_postgres("57P01"),
        ConnectionRefusedError(111, "Connection refused"),
        TimeoutError(),
        asyncpg.InterfaceError("connection is closed"),
    ],
    ids=["connection", "login", "no database", "too many", "shutdown", "refused", "timeout", "closed"],
)
def test_connection_errors_become_database_unavailable(error: Exception) -> None:
    """Connection, login and shutdown errors become DatabaseUnavailable, always with a message."""
    with (
        pytest.raises(
            DatabaseUnavailable, match=r"^(database unavailable|the database refused this login): .+"
        ) as caught,
        translated(),
    ):
        raise error
    # A server's error is not logged as the cause: its DETAIL may contain a row with a secret.
    assert caught.value.__cause__ is (None if isinstance(error, asyncpg.PostgresError) else error)


def test_invalid_dsn_is_a_configuration_error() -> None:
    """The error names the setting if asyncpg cannot parse the DSN."""
    with pytest.raises(ConfigurationError, match=r"^database\.dsn is invalid: "), translated():
        raise asyncpg.ClientConfigurationError("invalid DSN")


@pytest.mark.parametrize("sqlstate", ["42601", "23505", "WH999"], ids=["syntax", "unique", "unknown code"])
def test_unexpected_sqlstate_is_a_database_fault(sqlstate: str) -> None:
    """It keeps the server's code and message, but not its DETAIL, which may contain a row."""
    error = of_postgres(sqlstate)
    with pytest.raises(DatabaseFault, match=f"{sqlstate}: said the server") as caught, translated():
        raise error
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "sqlstate", ["40001", "40P01", "55P03"], ids=["conflict", "deadlock", "lock timeout"]
)
def test_conflicts_and_lock_timeouts_are_database_busy(sqlstate: str) -> None:
    """Nothing was changed and the same call may succeed, unlike with an unavailable database."""
    with pytest.raises(DatabaseBusy), translated():
        raise of_postgres(sqlstate)


def test_full_disk_is_database_full() -> None:
    """A full database still answers reads, so it has its own error."""
    with pytest.raises(DatabaseFull), translated():
        raise of_postgres("53100")


def test_driver_misuse_is_not_translated() -> None:
    """A bug in webhookd keeps its type, so that its traceback is logged."""
    with pytest.raises(asyncpg.InterfaceError), translated():
        raise asyncpg.InterfaceError("misuse")


def test_exit_codes_match_the_contract() -> None:
    """Each error has the exit code that DESIGN fixes."""
    codes: dict[type[WebhookdError], int] = {
        ConfigurationError: 78,
        DatabaseUnavailable: 69,
        SchemaProblem: 1,
        Refused: 1,
        WebhookdError: 1,
    }
    assert {kind: kind.exit_code for kind in codes} == codes
