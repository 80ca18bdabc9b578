"""Reads schema/ as it ships: inside the package when installed from a wheel, beside it in a checkout."""

import hashlib
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_MIGRATION_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_OWNER_LINE = re.compile(r"-- owner: ([a-z_]+)\n")
_PRODUCTS = ("deliveries", "jobqueue")


@dataclass(frozen=True)
class Migration:
    """A numbered change of the tables: applied once, never edited after the first tagged release."""

    version: int
    name: str
    text: str = field(repr=False)

    @property
    def checksum(self) -> str:
        return _checksum(self.text)


@dataclass(frozen=True)
class FunctionFile:
    """Functions of one owner, created as that role; all are applied again when any file changes."""

    name: str
    owner: str
    text: str = field(repr=False)


@dataclass(frozen=True)
class Schema:
    """Everything that `webhookd migrate` applies, in the order of application."""

    roles: str
    migrations: tuple[Migration, ...]
    revoke: str
    functions: tuple[FunctionFile, ...]
    planner: str
    triggers: str
    grants: str

    @property
    def triggers_checksum(self) -> str:
        """A checksum of its own, because applying triggers locks tables."""
        return _checksum(self.triggers)

    @property
    def code_checksum(self) -> str:
        """Of everything that is applied together: roles, functions, planner settings and privileges."""
        return _checksum(
            "\0".join(
                [self.roles, self.revoke, *(file.text for file in self.functions), self.planner, self.grants]
            )
        )


@cache
def shipped() -> Schema:
    """Return the schema of this webhookd."""
    return load(_folder())


def load(folder: Path) -> Schema:
    """Read a schema folder."""
    return Schema(
        roles=(folder / "roles.sql").read_text("utf-8"),
        migrations=tuple(_migration(path) for path in sorted((folder / "migrations").glob("*.sql"))),
        revoke=(folder / "revoke.sql").read_text("utf-8"),
        functions=tuple(_function_files(folder)),
        planner=(folder / "planner.sql").read_text("utf-8"),
        triggers=(folder / "triggers.sql").read_text("utf-8"),
        grants=(folder / "grants.sql").read_text("utf-8"),
    )


def _folder() -> Path:
    package = Path(__file__).resolve().parent.parent
    installed = package / "schema"
    return installed if installed.is_dir() else package.parent / "schema"


def _migration(path: Path) -> Migration:
    match = _MIGRATION_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not named like a migration: 0001_what_it_does.sql")
    return Migration(int(match[1]), path.stem, path.read_text("utf-8"))


def _function_files(folder: Path) -> list[FunctionFile]:
    """The functions, in an order in which each finds the helpers that it uses."""
    paths = [folder / "common.sql"]
    for product in _PRODUCTS:
        paths += sorted((folder / product).glob("*.sql"), key=lambda path: (path.stem != "common", path))
    return [_function_file(path.relative_to(folder).with_suffix("").as_posix(), path) for path in paths]


def _function_file(name: str, path: Path) -> FunctionFile:
    text = path.read_text("utf-8")
    match = _OWNER_LINE.match(text)
    if match is None:
        raise ValueError(f"{path.name} does not begin with the line `-- owner: role`")
    return FunctionFile(name, match[1], text)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
