"""Reading a DSN: other machines without TLS, a password, and a form that is safe to print."""

import pytest

from webhookd.core.settings import has_password, unencrypted_hosts, with_database, without_password


@pytest.mark.parametrize(
    ("dsn", "hosts"),
    [
        ("postgresql://u:p@db.example/app?sslmode=disable", ["db.example"]),
        ("postgresql://u:p@10.0.0.1:5433/app?sslmode=disable", ["10.0.0.1"]),
        ("postgresql://u@[2001:db8::1]:5432/app?sslmode=disable", ["2001:db8::1"]),
        ("postgresql://u@127.0.0.1:1,db.example:2/app?sslmode=disable", ["db.example"]),
        ("postgresql://u@/app?host=db.example&sslmode=disable", ["db.example"]),
        ("postgresql://u@/app?sslmode=disable&host=/run/a,10.0.0.1", ["10.0.0.1"]),
        ("postgresql://u@127.0.0.1/app?sslmode=disable", []),
        ("postgresql://u@localhost/app?sslmode=disable", []),
        ("postgresql://u@[::1]/app?sslmode=disable", []),
        ("postgresql://u@%2Frun%2Fpostgresql/app?sslmode=disable", []),
        ("postgresql:///app?sslmode=disable", []),
        ("postgresql://u:p@db.example/app", []),
        ("postgresql://u:p@db.example/app?sslmode=require", []),
        ("postgresql://[", []),
        ("", []),
    ],
)
def test_unencrypted_hosts(dsn: str, hosts: list[str]) -> None:
    """Every host that the DSN names counts, except this machine and sockets."""
    assert unencrypted_hosts(dsn) == hosts


@pytest.mark.parametrize(
    ("dsn", "has"),
    [
        ("postgresql://u:p@db/app", True),
        ("postgresql://u@db/app?password=p", True),
        ("postgresql://u@db:5432/app", False),
        ("postgresql://db:5432/app", False),
        ("", False),
    ],
)
def test_password_is_found(dsn: str, has: bool) -> None:
    """Before the host or in the query; a port is not a password."""
    assert has_password(dsn) is has


@pytest.mark.parametrize(
    ("dsn", "other"),
    [
        ("postgresql://u:p@db:5432/app?sslmode=require", "postgresql://u:p@db:5432/other?sslmode=require"),
        ("postgresql://u@a,b:5433", "postgresql://u@a,b:5433/other"),
        ("postgres:///app?host=/run/pg", "postgres:///other?host=/run/pg"),
    ],
)
def test_database_is_replaced(dsn: str, other: str) -> None:
    """Everything else stays the same, also without a host or without a database."""
    assert with_database(dsn, "other") == other


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://u%40x:hunter2@db:5432/app", "db:5432 as u@x"),
        ("postgresql://u:hunter%402@a,b/app?password=hunter2", "a,b as u"),
        ("postgresql:///app?host=/run/postgresql&user=u&password=hunter2", "/run/postgresql as u"),
        ("postgresql:///app", "this machine"),
    ],
)
def test_password_is_not_shown(dsn: str, shown: str) -> None:
    """Only the hosts and the user are shown."""
    assert without_password(dsn) == shown
