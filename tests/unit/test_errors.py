"""Tests of the errors: schema/ and Python agree on the codes, and a driver's error becomes the right one.

Reads schema/ as text, and makes the driver's errors by hand: no database is needed.
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
from webhookd.db.errors import translated

SCHEMA = Path(__file__).resolve().parents[2] / "schema"


def schema_texts() -> list[str]:
    """Every SQL file of schema/."""
    texts = [path.read_text("utf-8") for path in sorted(SCHEMA.rglob("*.sql"))]
    assert texts, "there is a schema"
    return texts


def of_postgres(sqlstate: str, **fields: str) -> asyncpg.PostgresError:
    """Make the error that asyncpg would raise for a server's message."""
    error = asyncpg.PostgresError.new({"C": sqlstate, "M": "said the server", **fields})
    assert isinstance(error, asyncpg.PostgresError)
    return error


def test_schema_and_python_know_the_same_refusals() -> None:
    """Each SQLSTATE of ours that schema/ raises is a Refusal, and each Refusal is raised somewhere."""
    raised = {code for text in schema_texts() for code in re.findall(r"errcode = '(WH[^']*)'", text)}
    assert raised == {refusal.value for refusal in Refusal}


def test_schema_speaks_of_no_other_refusal() -> None:
    """A code that is caught, or named in a comment, is one that is raised."""
    named = {code for text in schema_texts() for code in re.findall(r"\bWH[0-9A-Z]{3}\b", text)}
    assert named == {refusal.value for refusal in Refusal}


def test_the_test_bed_knows_the_schemas_roles() -> None:
    """The roles that the tests expect on a server are those that roles.sql makes."""
    arrays = re.findall(r"array\[([^\]]+)\]", (SCHEMA / "roles.sql").read_text("utf-8"))
    made = [name for array in arrays for name in re.findall(r"'([a-z_]+)'", array)]
    assert sorted(made) == sorted(SCHEMA_ROLES)


@pytest.mark.parametrize("refusal", Refusal)
def test_a_refusal_comes_out_in_its_own_words(refusal: Refusal) -> None:
    """A gated function's SQLSTATE becomes Refused, with its message, detail and hint."""
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
def test_a_database_that_does_not_answer_is_unavailable(error: Exception) -> None:
    """Whatever says "not now, or not to you" becomes DatabaseUnavailable, and never an empty message."""
    with (
        pytest.raises(
            DatabaseUnavailable, match=r"^(database unavailable|the database refused this login): .+"
        ) as caught,
        translated(),
    ):
        raise error
    # A server's error is left out of what is logged: its DETAIL may be a row with a secret in it.
    assert caught.value.__cause__ is (None if isinstance(error, asyncpg.PostgresError) else error)


def test_an_unusable_dsn_is_a_configuration_error() -> None:
    """What asyncpg cannot read as an address is blamed on the setting."""
    with pytest.raises(ConfigurationError, match=r"^database\.dsn cannot be used: "), translated():
        raise asyncpg.ClientConfigurationError("invalid DSN")


@pytest.mark.parametrize("sqlstate", ["42601", "23505", "WH999"], ids=["syntax", "unique", "unknown code"])
def test_what_should_never_come_is_a_fault(sqlstate: str) -> None:
    """It is an error of ours, with the server's code and message and without its DETAIL: a row, perhaps."""
    error = of_postgres(sqlstate)
    with pytest.raises(DatabaseFault, match=f"{sqlstate}: said the server") as caught, translated():
        raise error
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "sqlstate", ["40001", "40P01", "55P03"], ids=["conflict", "deadlock", "lock timeout"]
)
def test_who_was_in_anothers_way_may_try_again(sqlstate: str) -> None:
    """Nothing was changed, and the same call may succeed: not the same as a database that is away."""
    with pytest.raises(DatabaseBusy), translated():
        raise of_postgres(sqlstate)


def test_a_full_disk_is_told_apart() -> None:
    """A database that is full answers all the same."""
    with pytest.raises(DatabaseFull), translated():
        raise of_postgres("53100")


def test_misuse_of_the_driver_goes_through_as_it_is() -> None:
    """A bug of ours keeps its type, so that its traceback is seen."""
    with pytest.raises(asyncpg.InterfaceError), translated():
        raise asyncpg.InterfaceError("misuse")


def test_exit_codes_are_the_contract() -> None:
    """Each error ends a command with the exit code that DESIGN fixes."""
    codes: dict[type[WebhookdError], int] = {
        ConfigurationError: 78,
        DatabaseUnavailable: 69,
        SchemaProblem: 1,
        Refused: 1,
        WebhookdError: 1,
    }
    assert {kind: kind.exit_code for kind in codes} == codes
