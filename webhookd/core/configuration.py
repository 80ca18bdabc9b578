"""File and environment in, Settings out; or one ConfigurationError naming key, place and likely fix.

The environment wins over the file: WEBHOOKD_<SECTION>_<KEY>.
"""

import difflib
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from webhookd.core.errors import ConfigurationError
from webhookd.core.settings import Settings, Token, problems

_SEARCHED = (Path("webhookd.toml"), Path("/etc/webhookd/webhookd.toml"))


def find_file(named: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The named file, else $WEBHOOKD_CONFIG, else where one is looked for, else none."""
    if named is None and environment.get("WEBHOOKD_CONFIG"):
        named = Path(environment["WEBHOOKD_CONFIG"])
    found = named or next((candidate for candidate in _SEARCHED if candidate.is_file()), None)
    return found and found.absolute()


def load_settings(named: Path | None, environment: Mapping[str, str]) -> Settings:
    """Settings from the file that is found, if any, and the environment."""
    path = find_file(named, environment)
    tables = _read(path) if path else {}
    _refuse_unknown(tables, path)
    _refuse_misspelt(environment)
    used = False
    for section, field in _known_keys():
        variable = f"WEBHOOKD_{section}_{field.name}".upper()
        if variable in environment:
            used = True
            tables.setdefault(section, {})[field.name] = _from_text(
                variable, environment[variable], field.type
            )
    try:
        settings = msgspec.convert(tables, Settings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{_place(path)}{error}") from error
    for problem in problems(settings):
        # Between fields, some of which may be the environment's.
        raise ConfigurationError(f"{_place(None if used else path)}{problem}")
    return settings


def _from_text(variable: str, text: str, kind: Any) -> Any:
    """A value from the environment, where everything is text: a list is separated by commas.

    A list of tables, which are api.tokens, is JSON.
    """
    value: Any = text
    if kind == tuple[Token, ...]:
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{variable}: {error}") from error
    elif typing.get_origin(kind) is tuple:
        value = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.to_builtins(msgspec.convert(value, kind, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{variable}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or more than the parser can bear
        raise ConfigurationError(f"{path} is not TOML: {error}") from error


def _refuse_unknown(tables: Mapping[str, Any], path: Path | None) -> None:
    sections = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    for section, table in tables.items():
        if section not in sections:
            raise ConfigurationError(_unknown(path, "section", f"[{section}]", section, sections))
        if not isinstance(table, dict):
            raise ConfigurationError(f"{_place(path)}[{section}] must be a table")
        keys = [field.name for field in msgspec.structs.fields(sections[section])]
        for key in table:
            if key not in keys:
                raise ConfigurationError(_unknown(path, "key", f"{section}.{key}", key, keys))


def _refuse_misspelt(environment: Mapping[str, str]) -> None:
    """A variable that nearly is one of ours. Others are left alone: Kubernetes makes WEBHOOKD_API_PORT."""
    known = [(section, field.name) for section, field in _known_keys()]
    for section in {section for section, _ in known}:
        prefix = f"WEBHOOKD_{section.upper()}_"
        keys = [key.upper() for known_section, key in known if known_section == section]
        for variable in environment:
            key = variable.removeprefix(prefix)
            if key in (variable, *keys):
                continue
            if close := difflib.get_close_matches(key, keys, n=1, cutoff=0.8):
                raise ConfigurationError(f"unknown variable {variable}: did you mean {prefix}{close[0]}?")


def _known_keys() -> list[tuple[str, msgspec.structs.FieldInfo]]:
    return [
        (section.name, field)
        for section in msgspec.structs.fields(Settings)
        for field in msgspec.structs.fields(section.type)
    ]


def _unknown(path: Path | None, what: str, shown: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f": did you mean {close[0]}?" if close else ""
    return f"{_place(path)}unknown {what} {shown}{hint}"


def _place(path: Path | None) -> str:
    return f"{path}: " if path else ""
