"""Loads Settings from the configuration file and the environment, and finds the data folder.

A mistake raises one ConfigurationError that names the file, the key and the likely fix. A variable
WEBHOOKD_<SECTION>_<KEY> overrides the file.
"""

import difflib
import os
import re
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from webhookd.core.errors import ConfigurationError
from webhookd.core.settings import Settings, Token, problems

PREFIX = "WEBHOOKD_"
# Read by commands, or set by `jobs work` for the command that it runs, which may call webhookd itself.
COMMAND_VARIABLES = (
    "WEBHOOKD_CONFIG",
    "WEBHOOKD_URL",
    "WEBHOOKD_TOKEN",
    "WEBHOOKD_SECRET",
    "WEBHOOKD_JOB_ID",
    "WEBHOOKD_JOB_KIND",
    "WEBHOOKD_JOB_ATTEMPT",
    "WEBHOOKD_RESULT_FILE",
)
TEST_PREFIX = "WEBHOOKD_TEST_"

_SEARCHED = (Path("webhookd.toml"), Path("/etc/webhookd/webhookd.toml"))
# For a service called webhookd or webhookd-…, Kubernetes sets these in every pod of the namespace, as
# "NAME=value". The value of …_PORT is a URL: WEBHOOKD_API_PORT=8080 is a mistake for WEBHOOKD_API_LISTEN.
_OF_KUBERNETES = re.compile(
    r"""WEBHOOKD(_[A-Z0-9_]+)?_(
        SERVICE_HOST=.* | SERVICE_PORT(_[A-Z0-9_]+)?=.*
        | PORT=(tcp|udp|sctp)://.* | PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.*
    )""",
    re.VERBOSE | re.DOTALL,
)
# Instead of the regular expression that did not match.
_EXAMPLES = {
    "listen": "an address like 127.0.0.1:8470 or [::1]:8470",
    "sha256": "a SHA-256 digest: 64 hexadecimal digits",
}


def find_file(named: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the named file, else $WEBHOOKD_CONFIG, else the first that exists in the usual places."""
    if named is None and environment.get("WEBHOOKD_CONFIG"):
        named = Path(environment["WEBHOOKD_CONFIG"])
    found = named or next((candidate for candidate in _SEARCHED if candidate.is_file()), None)
    return found and found.absolute()


def load_settings(named: Path | None, environment: Mapping[str, str]) -> Settings:
    """Load the settings from the file, if there is one, and from the environment."""
    path = find_file(named, environment)
    tables = _read(path) if path else {}
    _reject_unknown_keys(tables, path)
    _reject_unknown_variables(environment)
    set_here = setting_variables(environment)
    for variable, (section, field) in set_here.items():
        value = _from_text(variable, environment[variable], field.type)
        tables.setdefault(section, {})[field.name] = value
    try:
        settings = msgspec.convert(tables, Settings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{_place(path)}{_explained(error)}") from error
    for problem in problems(settings):
        # It is about several keys, and some of them may come from the environment.
        raise ConfigurationError(f"{_place(None if set_here else path)}{problem}")
    return settings


def setting_variables(environment: Mapping[str, str]) -> dict[str, tuple[str, msgspec.structs.FieldInfo]]:
    """Return the variables that are set and name a setting, each with its section and field."""
    return {name: setting for name, setting in _settings().items() if name in environment}


def data_dir(settings: Settings) -> Path:
    """Return the absolute path of the folder for the embedded server and the local certificates.

    The folder may not exist yet.
    """
    named = settings.database.data_dir
    if not named:
        return _default_data_dir()
    if "\0" in named:
        raise ConfigurationError("database.data_dir cannot be used: it contains a NUL character")
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigurationError(f"database.data_dir cannot be used: {error}") from error


def _default_data_dir() -> Path:
    import platformdirs  # noqa: PLC0415  most commands do not need the folder

    if os.geteuid() != 0:
        return platformdirs.user_data_path("webhookd", appauthor=False)
    # Not in root's home: PostgreSQL does not run as root, and the account it runs as cannot enter there.
    if sys.platform == "linux":
        return Path("/var/lib/webhookd")
    return platformdirs.site_data_path("webhookd", appauthor=False)


def _from_text(variable: str, text: str, kind: Any) -> Any:
    """Convert a variable's text: lists are separated by commas, api.tokens is JSON."""
    value: Any = text
    if kind == tuple[Token, ...]:
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{variable} is not JSON: {error}") from error
    elif typing.get_origin(_without_metadata(kind)) is tuple:
        value = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.to_builtins(msgspec.convert(value, kind, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigurationError(_explained(error, variable)) from error


def _without_metadata(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _explained(error: msgspec.ValidationError, name: str = "") -> str:
    """Put the name in front of msgspec's message, which ends with its path: … - at `$.api.tokens[0].name`."""
    message, _, path = str(error).partition(" - at `$")
    place = path.rstrip("`")
    name = name + place if name else place.lstrip(".")
    if "matching regex" in message:
        example = next((text for key, text in _EXAMPLES.items() if name.lower().endswith(key)), None)
        message = f"Expected {example}" if example else message
    if message.startswith("Expected "):
        return f"{name} must be {message.removeprefix('Expected ')}"
    return f"{name}: {message}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deeply for the parser
        raise ConfigurationError(f"{path} is not TOML: {error}") from error


def _reject_unknown_keys(tables: Mapping[str, Any], path: Path | None) -> None:
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


def _reject_unknown_variables(environment: Mapping[str, str]) -> None:
    known = (*_settings(), *COMMAND_VARIABLES)
    for name, value in environment.items():
        if not name.startswith(PREFIX) or name.startswith(TEST_PREFIX) or name in known:
            continue
        if not _OF_KUBERNETES.fullmatch(f"{name}={value}"):
            meant = _closest_variable(name, known)
            hint = f"did you mean {meant}?" if meant else "settings are called WEBHOOKD_<SECTION>_<KEY>"
            raise ConfigurationError(f"unknown environment variable {name}: {hint}")


def _closest_variable(name: str, known: Iterable[str]) -> str | None:
    """Compare without the common prefix, which would make every name close."""
    names = [variable.removeprefix(PREFIX) for variable in known]
    word = name.removeprefix(PREFIX)
    with_section = [variable for variable in names if variable.endswith(f"_{word}")]
    close = with_section if len(with_section) == 1 else difflib.get_close_matches(word, names, n=1)
    return PREFIX + close[0] if close else None


def _settings() -> dict[str, tuple[str, msgspec.structs.FieldInfo]]:
    return {
        f"{PREFIX}{section.name}_{field.name}".upper(): (section.name, field)
        for section in msgspec.structs.fields(Settings)
        for field in msgspec.structs.fields(section.type)
    }


def _unknown(path: Path | None, what: str, shown: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f": did you mean {close[0]}?" if close else ""
    return f"{_place(path)}unknown {what} {shown}{hint}"


def _place(path: Path | None) -> str:
    return f"{path}: " if path else ""
