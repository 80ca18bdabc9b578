"""The configuration: where it is searched, what takes precedence, and how mistakes are reported."""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from webhookd.core import configuration
from webhookd.core.configuration import data_dir, load_settings
from webhookd.core.errors import ConfigurationError
from webhookd.core.settings import DatabaseSettings, Settings

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, text: str | bytes) -> Path:
    """Create a configuration file, byte for byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def naming(path: Path) -> Path:
    """Create a configuration file with a setting that names its folder."""
    return write(path, f'[database]\ndsn = "{path.parent.name}"\n')


def folder_of(named: str) -> Path:
    """The data folder for a value of database.data_dir."""
    return data_dir(Settings(database=DatabaseSettings(data_dir=named)))


def refusal(path: Path | None, environment: dict[str, str] | None = None) -> str:
    """The error message for an invalid configuration: one line."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path, environment or {})
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to the folder `here`, and use the folder `etc` as /etc. Neither has a file yet."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(
        configuration, "_SEARCHED", (configuration._SEARCHED[0], tmp_path / "etc" / "webhookd.toml")
    )
    return tmp_path


def test_files_are_searched_here_and_in_etc() -> None:
    """DESIGN fixes these places and their order."""
    assert [str(path) for path in configuration._SEARCHED] == ["webhookd.toml", "/etc/webhookd/webhookd.toml"]


def test_first_file_found_is_used(machine: Path) -> None:
    """--config comes before $WEBHOOKD_CONFIG, that before ./webhookd.toml, that before /etc."""
    assert load_settings(None, {}) == Settings()
    naming(machine / "etc" / "webhookd.toml")
    assert load_settings(None, {}).database.dsn == "etc"
    naming(machine / "here" / "webhookd.toml")
    assert load_settings(None, {}).database.dsn == "here"
    environment = {"WEBHOOKD_CONFIG": str(naming(machine / "variable" / "any.toml"))}
    assert load_settings(None, environment).database.dsn == "variable"
    assert load_settings(naming(machine / "named" / "any.toml"), environment).database.dsn == "named"


def test_empty_config_variable_is_ignored(machine: Path) -> None:
    """WEBHOOKD_CONFIG set to an empty string counts as unset."""
    naming(machine / "here" / "webhookd.toml")
    assert load_settings(None, {"WEBHOOKD_CONFIG": ""}).database.dsn == "here"


@pytest.mark.usefixtures("machine")
def test_file_is_optional() -> None:
    """Without a file, the environment overrides the defaults."""
    settings = load_settings(None, {"WEBHOOKD_DATABASE_DSN": "postgresql://db"})
    assert settings == Settings(database=DatabaseSettings(dsn="postgresql://db"))


def test_folder_in_place_of_a_file_is_skipped(machine: Path) -> None:
    """The search only finds files."""
    (machine / "here" / "webhookd.toml").mkdir()
    naming(machine / "etc" / "webhookd.toml")
    assert load_settings(None, {}).database.dsn == "etc"


def test_environment_overrides_the_file(tmp_path: Path) -> None:
    """WEBHOOKD_<SECTION>_<KEY> replaces the value in the file, also with an empty one."""
    path = write(tmp_path / "webhookd.toml", '[database]\ndsn = "postgresql://file"\n')
    assert load_settings(path, {}).database.dsn == "postgresql://file"
    environment = {"WEBHOOKD_DATABASE_DSN": "postgresql://environment"}
    assert load_settings(path, environment).database.dsn == "postgresql://environment"
    assert load_settings(path, {"WEBHOOKD_DATABASE_DSN": ""}).database.dsn == ""


def test_mistake_in_an_overridden_file_is_reported(tmp_path: Path) -> None:
    """The file must be valid even where the environment overrides it."""
    path = write(tmp_path / "webhookd.toml", '[database]\nnds = "x"\n')
    assert "unknown key database.nds" in refusal(path, {"WEBHOOKD_DATABASE_DSN": "postgresql://db"})


def test_job_settings_default_to_the_database() -> None:
    """Only given values are written to the database; both delays must be consistent."""
    assert Settings().jobs.given == {}
    given = {"WEBHOOKD_JOBS_MAX_ATTEMPTS": "7", "WEBHOOKD_JOBS_JITTER": "0.5"}
    settings = load_settings(None, given | {"WEBHOOKD_JOBS_BASE_DELAY_SECONDS": "database"})
    assert settings.jobs.given == {"max_attempts": 7, "jitter": 0.5}
    assert "WEBHOOKD_JOBS_MAX_ATTEMPTS" in refusal(None, {"WEBHOOKD_JOBS_MAX_ATTEMPTS": "0"})
    delays = {"WEBHOOKD_JOBS_BASE_DELAY_SECONDS": "5", "WEBHOOKD_JOBS_MAX_DELAY_SECONDS": "4"}
    assert "jobs.max_delay_seconds" in refusal(None, delays)


def test_unknown_section_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    """The message names the file and the closest section."""
    path = write(tmp_path / "webhookd.toml", '[databse]\ndsn = "x"\n')
    assert refusal(path) == f"{path}: unknown section [databse]: did you mean database?"


def test_unknown_key_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    """The message names the file, the section and the closest key."""
    path = write(tmp_path / "webhookd.toml", '[database]\ndns = "x"\n')
    assert refusal(path) == f"{path}: unknown key database.dns: did you mean dsn?"


def test_no_suggestion_without_a_close_name(tmp_path: Path) -> None:
    """A far-fetched suggestion would mislead."""
    assert "did you mean" not in refusal(write(tmp_path / "a.toml", "[zzzzzzzz]\n"))
    assert "did you mean" not in refusal(write(tmp_path / "b.toml", "[database]\nzzzzzzzz = 1\n"))


@pytest.mark.parametrize("value", ["5", "true", '["x"]', "2026-01-01", '{ name = "x" }'])
def test_wrong_type_is_rejected(tmp_path: Path, value: str) -> None:
    """The message names the file, the key and the expected type."""
    path = write(tmp_path / "webhookd.toml", f"[database]\ndsn = {value}\n")
    message = refusal(path)
    assert str(path) in message
    assert "database.dsn" in message
    assert "str" in message


@pytest.mark.parametrize("text", ["database = 5\n", "[[database]]\n"])
def test_section_must_be_a_table(tmp_path: Path, text: str) -> None:
    """Anything else is rejected, even if the environment sets a key of the section."""
    path = write(tmp_path / "webhookd.toml", text)
    message = refusal(path, {"WEBHOOKD_DATABASE_DSN": "postgresql://db"})
    assert message == f"{path}: [database] must be a table"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[database]\ndsn = \n", 2),
        ('[database]\n\ndsn = "a\n', 3),
        ("[database\n", 1),
        ("[database]\ndsn = 'a'\ndsn = 'b'\n", 3),
    ],
)
def test_invalid_toml_is_rejected(tmp_path: Path, text: str, line: int) -> None:
    """The message names the file and the line."""
    path = write(tmp_path / "webhookd.toml", text)
    message = refusal(path)
    assert message.startswith(f"{path} is not TOML: ")
    assert f"at line {line}," in message


@pytest.mark.parametrize(
    "text",
    ["[database]\ndsn = " + "[" * 10_000, "[database]\ndsn = 1" + "0" * 5_000],
    ids=["deeply nested", "huge number"],
)
def test_file_that_crashes_the_parser_is_rejected(tmp_path: Path, text: str) -> None:
    """An error inside Python's parser is reported like any other mistake, without traceback."""
    path = write(tmp_path / "webhookd.toml", text)
    assert str(path) in refusal(path)


def test_byte_order_mark_is_rejected(tmp_path: Path) -> None:
    """Some editors write one; the message names the file and the line."""
    path = write(tmp_path / "webhookd.toml", b'\xef\xbb\xbf[database]\ndsn = "x"\n')
    message = refusal(path)
    assert str(path) in message
    assert "line 1," in message


def test_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    """CR LF ends a line and is not part of a value."""
    path = write(tmp_path / "webhookd.toml", b'[database]\r\ndsn = "x"\r\n')
    assert load_settings(path, {}).database.dsn == "x"


@pytest.mark.parametrize("text", [b'[database]\ndsn = "\xff"\n', '[database]\ndsn = "x"\n'.encode("utf-16")])
def test_other_encodings_are_rejected(tmp_path: Path, text: bytes) -> None:
    """The encoding is not guessed; the message names the file."""
    path = write(tmp_path / "webhookd.toml", text)
    message = refusal(path)
    assert str(path) in message
    assert "utf-8" in message


def test_named_file_must_exist(machine: Path) -> None:
    """A missing named file is an error, even if the search would find another file."""
    naming(machine / "here" / "webhookd.toml")
    missing = machine / "missing.toml"
    expected = f"{missing} cannot be read: No such file or directory"
    assert refusal(missing) == expected
    assert refusal(None, {"WEBHOOKD_CONFIG": str(missing)}) == expected


def test_named_folder_is_rejected(tmp_path: Path) -> None:
    """The message says that it is a folder."""
    assert refusal(tmp_path) == f"{tmp_path} cannot be read: Is a directory"


def test_example_file_shows_every_key_with_its_default() -> None:
    """webhookd.toml in the repository is the reference of all settings."""
    shown = tomllib.loads((ROOT / "webhookd.toml").read_text("utf-8"))
    known = {
        (section.name, key.name)
        for section in msgspec.structs.fields(Settings)
        for key in msgspec.structs.fields(section.type)
    }
    assert {(section, key) for section, table in shown.items() for key in table} == known
    assert load_settings(ROOT / "webhookd.toml", {}) == Settings()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("WEBHOOKD_RETRY_MAX_ATEMPTS", "WEBHOOKD_RETRY_MAX_ATTEMPTS"),
        ("WEBHOOKD_DB_DSN", "WEBHOOKD_DATABASE_DSN"),
        ("WEBHOOKD_DSN", "WEBHOOKD_DATABASE_DSN"),
        ("WEBHOOKD_DATABASE_URL", "WEBHOOKD_DATABASE_DSN"),
        ("WEBHOOKD_TOKEM", "WEBHOOKD_TOKEN"),
    ],
)
def test_unknown_variable_is_rejected_with_a_suggestion(variable: str, meant: str) -> None:
    """Ignoring WEBHOOKD_DB_DSN would start an embedded database instead of using the one it names."""
    assert refusal(None, {variable: "x"}) == f"unknown environment variable {variable}: did you mean {meant}?"


def test_unknown_variable_without_a_close_match() -> None:
    """The message explains how variables are named."""
    message = refusal(None, {"WEBHOOKD_ZZZZZZZZ": "x"})
    assert "did you mean" not in message
    assert "WEBHOOKD_<SECTION>_<KEY>" in message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WEBHOOKD_SERVICE_HOST", "10.0.0.1"),
        ("WEBHOOKD_SERVICE_PORT", "8470"),
        ("WEBHOOKD_PORT", "tcp://10.0.0.1:8470"),
        ("WEBHOOKD_API_SERVICE_HOST", "10.0.0.1"),
        ("WEBHOOKD_API_SERVICE_PORT", "8470"),
        ("WEBHOOKD_API_SERVICE_PORT_HTTP", "8470"),
        ("WEBHOOKD_API_PORT", "tcp://10.0.0.1:8470"),
        ("WEBHOOKD_API_PORT_8470_TCP", "tcp://10.0.0.1:8470"),
        ("WEBHOOKD_API_PORT_8470_TCP_PROTO", "tcp"),
        ("WEBHOOKD_API_PORT_8470_TCP_PORT", "8470"),
        ("WEBHOOKD_API_PORT_8470_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_variables_that_kubernetes_injects_are_allowed(variable: str, value: str) -> None:
    """Kubernetes sets these in every pod for each service, here `webhookd` and `webhookd-api`."""
    assert load_settings(None, {variable: value}) == Settings()


def test_port_number_in_a_kubernetes_like_variable_is_rejected() -> None:
    """Kubernetes writes tcp://address:port there. A bare number is a user's guess at a setting."""
    assert "unknown environment variable" in refusal(None, {"WEBHOOKD_API_PORT": "8080"})


@pytest.mark.parametrize(
    "variable",
    ["WEBHOOKD_CONFIG", "WEBHOOKD_TOKEN", "WEBHOOKD_SECRET", "WEBHOOKD_JOB_ID", "WEBHOOKD_TEST_DSN"],
)
@pytest.mark.usefixtures("machine")
def test_variables_of_commands_are_allowed(variable: str) -> None:
    """The CLI reads some of them; `jobs work` sets others for the commands that it runs."""
    assert load_settings(None, {variable: ""}) == Settings()


@pytest.mark.parametrize("address", ["8470", "127.0.0.1", "::1:8470", "http://127.0.0.1:8470", ""])
def test_malformed_address_is_explained_with_an_example(tmp_path: Path, address: str) -> None:
    """An example helps, a regular expression does not; the file and the environment say the same."""
    explained = "must be an address like 127.0.0.1:8470 or [::1]:8470"
    path = write(tmp_path / "webhookd.toml", f'[api]\nlisten = "{address}"\n')
    assert refusal(path) == f"{path}: api.listen {explained}"
    assert refusal(None, {"WEBHOOKD_API_LISTEN": address}) == f"WEBHOOKD_API_LISTEN {explained}"


def test_malformed_token_digest_is_explained(tmp_path: Path) -> None:
    """The position in the list tells which token it is."""
    token = '{ name = "ci", sha256 = "abc", scopes = ["read"] }'
    path = write(tmp_path / "webhookd.toml", f"[api]\ntokens = [{token}]\n")
    assert refusal(path) == f"{path}: api.tokens[0].sha256 must be a SHA-256 digest: 64 hexadecimal digits"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("WEBHOOKD_SERVICES_ENABLED", "api, routing", ("api", "routing")),
        ("WEBHOOKD_SUBSCRIPTIONS_VERIFICATION_METHODS", "challenge,ping", ("challenge", "ping")),
        ("WEBHOOKD_DELIVERY_ALLOW_NETWORKS", "", ()),
    ],
)
def test_list_from_the_environment(variable: str, text: str, value: object) -> None:
    """It is separated by commas, also where the length of the list is limited."""
    settings = load_settings(None, {variable: text})
    section, _, key = variable.removeprefix("WEBHOOKD_").lower().partition("_")
    assert getattr(getattr(settings, section), key) == value


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("auto", "auto")])
def test_auto_migrate_from_the_environment(text: str, value: object) -> None:
    """The text is converted to the file's value; other words are rejected."""
    settings = load_settings(None, {"WEBHOOKD_DATABASE_AUTO_MIGRATE": text})
    assert settings.database.auto_migrate is value
    assert "WEBHOOKD_DATABASE_AUTO_MIGRATE" in refusal(None, {"WEBHOOKD_DATABASE_AUTO_MIGRATE": "maybe"})


@pytest.mark.parametrize(
    ("dsn", "auto_migrate", "may"),
    [
        ("", "auto", True),
        ("postgresql://db", "auto", False),
        ("", False, False),
        ("postgresql://db", True, True),
    ],
)
def test_only_the_embedded_server_is_migrated_by_default(
    dsn: str, auto_migrate: bool | Literal["auto"], may: bool
) -> None:
    """An explicit auto_migrate takes precedence."""
    assert DatabaseSettings(dsn=dsn, auto_migrate=auto_migrate).may_migrate is may


def test_named_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The path becomes absolute, and ~ is the user's home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")
    assert folder_of("data") == tmp_path / "data"
    assert folder_of("~/data") == Path("/home/user/data")


@pytest.mark.parametrize("named", ["~no-such-user/data", "a\0b"])
def test_invalid_data_folder(named: str) -> None:
    """The message names the key."""
    with pytest.raises(ConfigurationError, match=r"^database\.data_dir cannot be used: "):
        folder_of(named)


def test_default_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the user's home; for root it is a folder that the PostgreSQL account can enter."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/user/.local/share")
    assert folder_of("") == Path("/home/user/.local/share/webhookd")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert folder_of("") == Path("/var/lib/webhookd")


@pytest.mark.parametrize("value", ["-1", "0", "inf", "nan", "1e400", "10000000000000000000000000"])
@pytest.mark.parametrize(
    "key",
    [
        "database.pool_size",
        "services.poll_interval_seconds",
        "delivery.timeout_seconds",
        "delivery.lease_seconds",
        "delivery.concurrency",
        "retry.max_attempts",
        "api.max_payload_bytes",
    ],
)
def test_f3_number_out_of_range_is_rejected(tmp_path: Path, key: str, value: str) -> None:
    """The message names the key and the allowed range."""
    section, name = key.split(".")
    message = refusal(write(tmp_path / "webhookd.toml", f"[{section}]\n{name} = {value}\n"))
    assert key in message
