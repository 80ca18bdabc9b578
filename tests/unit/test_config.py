"""Tests of the configuration: where it is looked for, what wins, and what is said about a mistake in it."""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from webhookd.core import configuration as load
from webhookd.core.configuration import data_dir, load_settings
from webhookd.core.errors import ConfigurationError
from webhookd.core.settings import DatabaseSettings, Settings

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, text: str | bytes) -> Path:
    """Make a configuration file, byte for byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def naming(path: Path) -> Path:
    """Make a configuration file whose setting says where it stands."""
    return write(path, f'[database]\ndsn = "{path.parent.name}"\n')


def folder_of(named: str) -> Path:
    """The data folder that a setting means."""
    return data_dir(Settings(database=DatabaseSettings(data_dir=named)))


def refusal(path: Path | None, environment: dict[str, str] | None = None) -> str:
    """What is said about a configuration that cannot be used."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path, environment or {})
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in the folder `here` of a machine whose /etc is the folder `etc`, without any file yet."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(load, "_SEARCHED", (load._SEARCHED[0], tmp_path / "etc" / "webhookd.toml"))
    return tmp_path


def test_searched_places_are_the_contract() -> None:
    """Without a name, a file is looked for here first, then in /etc/webhookd."""
    assert [str(path) for path in load._SEARCHED] == ["webhookd.toml", "/etc/webhookd/webhookd.toml"]


def test_the_first_place_that_has_a_file_wins(machine: Path) -> None:
    """--config comes before $WEBHOOKD_CONFIG, that before ./webhookd.toml, that before /etc."""
    assert load_settings(None, {}) == Settings()
    naming(machine / "etc" / "webhookd.toml")
    assert load_settings(None, {}).database.dsn == "etc"
    naming(machine / "here" / "webhookd.toml")
    assert load_settings(None, {}).database.dsn == "here"
    environment = {"WEBHOOKD_CONFIG": str(naming(machine / "variable" / "any.toml"))}
    assert load_settings(None, environment).database.dsn == "variable"
    assert load_settings(naming(machine / "named" / "any.toml"), environment).database.dsn == "named"


def test_an_empty_variable_names_no_file(machine: Path) -> None:
    """WEBHOOKD_CONFIG set to nothing is as if it were not set."""
    naming(machine / "here" / "webhookd.toml")
    assert load_settings(None, {"WEBHOOKD_CONFIG": ""}).database.dsn == "here"


@pytest.mark.usefixtures("machine")
def test_no_file_is_fine() -> None:
    """Without any file the environment alone configures, over the defaults."""
    settings = load_settings(None, {"WEBHOOKD_DATABASE_DSN": "postgresql://db"})
    assert settings == Settings(database=DatabaseSettings(dsn="postgresql://db"))


def test_a_folder_where_a_file_is_looked_for_is_passed_over(machine: Path) -> None:
    """Only a file is found by searching."""
    (machine / "here" / "webhookd.toml").mkdir()
    naming(machine / "etc" / "webhookd.toml")
    assert load_settings(None, {}).database.dsn == "etc"


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    """WEBHOOKD_<SECTION>_<KEY> replaces what the file says, also with nothing."""
    path = write(tmp_path / "webhookd.toml", '[database]\ndsn = "postgresql://file"\n')
    assert load_settings(path, {}).database.dsn == "postgresql://file"
    environment = {"WEBHOOKD_DATABASE_DSN": "postgresql://environment"}
    assert load_settings(path, environment).database.dsn == "postgresql://environment"
    assert load_settings(path, {"WEBHOOKD_DATABASE_DSN": ""}).database.dsn == ""


def test_a_good_environment_does_not_excuse_a_bad_file(tmp_path: Path) -> None:
    """A mistake in the file is told even where the environment would win."""
    path = write(tmp_path / "webhookd.toml", '[database]\nnds = "x"\n')
    assert "unknown key database.nds" in refusal(path, {"WEBHOOKD_DATABASE_DSN": "postgresql://db"})


def test_the_numbers_of_jobs_are_the_databases_unless_given() -> None:
    """What is not said is not written there; what is, is; and both delays must fit each other."""
    assert Settings().jobs.given == {}
    given = {"WEBHOOKD_JOBS_MAX_ATTEMPTS": "7", "WEBHOOKD_JOBS_JITTER": "0.5"}
    settings = load_settings(None, given | {"WEBHOOKD_JOBS_BASE_DELAY_SECONDS": "database"})
    assert settings.jobs.given == {"max_attempts": 7, "jitter": 0.5}
    assert "WEBHOOKD_JOBS_MAX_ATTEMPTS" in refusal(None, {"WEBHOOKD_JOBS_MAX_ATTEMPTS": "0"})
    delays = {"WEBHOOKD_JOBS_BASE_DELAY_SECONDS": "5", "WEBHOOKD_JOBS_MAX_DELAY_SECONDS": "4"}
    assert "jobs.max_delay_seconds" in refusal(None, delays)


def test_an_unknown_section_is_refused_with_the_likely_one(tmp_path: Path) -> None:
    """A misspelt section is named with its file and the section that was probably meant."""
    path = write(tmp_path / "webhookd.toml", '[databse]\ndsn = "x"\n')
    assert refusal(path) == f"{path}: unknown section [databse]: did you mean database?"


def test_an_unknown_key_is_refused_with_the_likely_one(tmp_path: Path) -> None:
    """A misspelt key is named with its file, its section and the key that was probably meant."""
    path = write(tmp_path / "webhookd.toml", '[database]\ndns = "x"\n')
    assert refusal(path) == f"{path}: unknown key database.dns: did you mean dsn?"


def test_a_name_like_no_other_gets_no_guess(tmp_path: Path) -> None:
    """Nothing is suggested where nothing is close."""
    assert "did you mean" not in refusal(write(tmp_path / "a.toml", "[zzzzzzzz]\n"))
    assert "did you mean" not in refusal(write(tmp_path / "b.toml", "[database]\nzzzzzzzz = 1\n"))


@pytest.mark.parametrize("value", ["5", "true", '["x"]', "2026-01-01", '{ name = "x" }'])
def test_a_wrong_type_is_refused_with_its_key(tmp_path: Path, value: str) -> None:
    """A value of another type is told with file, key and what was expected."""
    path = write(tmp_path / "webhookd.toml", f"[database]\ndsn = {value}\n")
    message = refusal(path)
    assert str(path) in message
    assert "database.dsn" in message
    assert "str" in message


@pytest.mark.parametrize("text", ["database = 5\n", "[[database]]\n"])
def test_a_section_must_be_a_table(tmp_path: Path, text: str) -> None:
    """A section's name used for something else is refused, even if the environment sets one of its keys."""
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
def test_what_is_not_toml_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    """A mistake of form is told with the file and the line it is on."""
    path = write(tmp_path / "webhookd.toml", text)
    message = refusal(path)
    assert message.startswith(f"{path} is not TOML: ")
    assert f"at line {line}," in message


@pytest.mark.parametrize(
    "text",
    ["[database]\ndsn = " + "[" * 10_000, "[database]\ndsn = 1" + "0" * 5_000],
    ids=["deeply nested", "huge number"],
)
def test_what_the_parser_cannot_bear_is_refused_too(tmp_path: Path, text: str) -> None:
    """A file on which Python's parser itself gives up is a refused file, not a traceback."""
    path = write(tmp_path / "webhookd.toml", text)
    assert str(path) in refusal(path)


def test_a_byte_order_mark_is_refused_with_its_line(tmp_path: Path) -> None:
    """A file that some editor began with a BOM is refused where the BOM is."""
    path = write(tmp_path / "webhookd.toml", b'\xef\xbb\xbf[database]\ndsn = "x"\n')
    message = refusal(path)
    assert str(path) in message
    assert "line 1," in message


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    """CR LF ends a line, and is no part of a value."""
    path = write(tmp_path / "webhookd.toml", b'[database]\r\ndsn = "x"\r\n')
    assert load_settings(path, {}).database.dsn == "x"


@pytest.mark.parametrize("text", [b'[database]\ndsn = "\xff"\n', '[database]\ndsn = "x"\n'.encode("utf-16")])
def test_what_is_not_utf_8_is_refused(tmp_path: Path, text: bytes) -> None:
    """Another encoding is refused with the file's name, not guessed at."""
    path = write(tmp_path / "webhookd.toml", text)
    message = refusal(path)
    assert str(path) in message
    assert "utf-8" in message


def test_a_named_file_must_be_there(machine: Path) -> None:
    """A file that was named and is missing is an error, even if another could be found."""
    naming(machine / "here" / "webhookd.toml")
    missing = machine / "missing.toml"
    expected = f"{missing} cannot be read: No such file or directory"
    assert refusal(missing) == expected
    assert refusal(None, {"WEBHOOKD_CONFIG": str(missing)}) == expected


def test_a_named_folder_is_refused(tmp_path: Path) -> None:
    """A folder where a file was named is an error that says so."""
    assert refusal(tmp_path) == f"{tmp_path} cannot be read: Is a directory"


def test_the_repositorys_file_shows_every_key_with_its_default() -> None:
    """webhookd.toml names each setting there is, and changes none."""
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


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("auto", "auto")])
def test_auto_migrate_from_the_environment(text: str, value: object) -> None:
    """Text becomes the value that the file would have; a word that is none of the three is refused."""
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
def test_only_the_embedded_server_is_migrated_unasked(
    dsn: str, auto_migrate: bool | Literal["auto"], may: bool
) -> None:
    """What is said wins; unsaid, it depends on whose server it is."""
    assert DatabaseSettings(dsn=dsn, auto_migrate=auto_migrate).may_migrate is may


def test_the_data_folder_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Absolute wherever it was named from, and with the home of the user for ~."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert folder_of("data") == tmp_path / "data"
    assert folder_of("~/data") == Path("/home/somebody/data")


@pytest.mark.parametrize("named", ["~nobody-of-this-name/data", "a\0b"])
def test_a_data_folder_that_cannot_be(named: str) -> None:
    """Told with its key."""
    with pytest.raises(ConfigurationError, match=r"^database\.data_dir cannot be used: "):
        folder_of(named)


def test_the_default_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own; root's is where the account that runs PostgreSQL can go."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/somebody/.local/share")
    assert folder_of("") == Path("/home/somebody/.local/share/webhookd")
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
def test_f3_a_number_out_of_its_range_is_refused(tmp_path: Path, key: str, value: str) -> None:
    """Negative, nothing, without end or beyond reason: the key and what it may be, in a line."""
    section, name = key.split(".")
    said = refusal(write(tmp_path / "webhookd.toml", f"[{section}]\n{name} = {value}\n"))
    assert key in said
