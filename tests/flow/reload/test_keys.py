"""Every setting is either reloadable, as a test shows, or reported as needing a restart."""

import importlib
import pkgutil
import re
from pathlib import Path

import msgspec

from tests.flow import reload
from tests.flow.conftest import MakeApi
from tests.flow.reload.swaps import SWAPPED
from tests.support.endpoint import Endpoint
from tests.support.postgres import free_port
from webhookd.core.settings import Settings
from webhookd.daemon.setup import restart_needed

ROOT = Path(__file__).resolve().parents[3]
EVERY_KEY = {
    f"{section.name}.{key.name}"
    for section in msgspec.structs.fields(Settings)
    for key in msgspec.structs.fields(section.type)
}
NEEDS_RESTART = {
    "database.dsn",
    "database.data_dir",
    "database.pool_size",
    "database.auto_migrate",
    "database.allow_unencrypted",
    "services.enabled",
    "api.listen",
    "api.health_listen",
}


def with_changed(key: str) -> Settings:
    """Return the default settings with another value for one key."""
    section, name = key.split(".")
    changed = msgspec.structs.replace(getattr(Settings(), section), **{name: object()})
    return msgspec.structs.replace(Settings(), **{section: changed})


def test_every_key_is_reloadable_or_needs_a_restart() -> None:
    """A new key needs a test that reloads it, or an entry in NEEDS_RESTART."""
    for module in pkgutil.iter_modules(reload.__path__, f"{reload.__name__}."):
        importlib.import_module(module.name)
    assert SWAPPED | NEEDS_RESTART == EVERY_KEY
    assert not SWAPPED & NEEDS_RESTART


def test_only_keys_that_need_a_restart_are_reported() -> None:
    """A changed reloadable key is not reported."""
    named = {key for key in EVERY_KEY if restart_needed(Settings(), with_changed(key))}
    assert named == NEEDS_RESTART
    assert restart_needed(Settings(), Settings()) == []


def test_keys_that_need_a_restart_are_reported_by_name() -> None:
    """The name is section.key, as in the file."""
    for key in NEEDS_RESTART:
        assert restart_needed(Settings(), with_changed(key)) == [key]


def test_example_file_marks_keys_that_need_a_restart() -> None:
    """In webhookd.toml, (restart) is in the comment of exactly these keys or of their section."""
    marked = set()
    section, comment = "", ""
    whole_section = False
    for line in (ROOT / "webhookd.toml").read_text("utf-8").partition("\n[")[2].splitlines():
        if header := re.match(r"\[?(\w+)\](.*)", line):
            section, comment = header[1], ""
            whole_section = "(restart)" in header[2]
        elif line.startswith("#"):
            comment += line
        elif key := re.match(r"(\w+) = ", line):
            if whole_section or "(restart)" in comment:
                marked.add(f"{section}.{key[1]}")
            comment = ""
    assert marked == NEEDS_RESTART


async def test_changed_keys_that_need_a_restart_are_logged_and_not_applied(
    make_api: MakeApi, endpoint: Endpoint
) -> None:
    """Each changed key is logged without its value, and the daemon continues with the old values."""
    api = await make_api()
    await api.subscribe(endpoint)
    daemon = api.daemon
    daemon.configure(
        database={"dsn": "postgresql://user:hunter2@127.0.0.1:1/nothing", "pool_size": 3},
        services={"enabled": ["api"]},
        api={"listen": f"127.0.0.1:{free_port()}"},
    )
    assert await daemon.reload()
    lines = [line["message"] for line in daemon.logged("restart webhookd to apply it")]
    assert {line.split(" ")[0].split(".")[0] for line in lines} == {"database", "services", "api"}
    assert "hunter2" not in "".join(daemon.output_lines())
    assert (await api.event()).status == 202
    await endpoint.received(2)


async def test_pending_restart_is_logged_at_every_reload(make_api: MakeApi) -> None:
    """Until the file has the running value again."""
    api = await make_api(database={"pool_size": 4})
    daemon = api.daemon
    for pool_size, named in ((5, 1), (5, 2), (4, 2)):
        daemon.configure(database={"pool_size": pool_size})
        assert await daemon.reload()
        assert len(daemon.logged("restart webhookd to apply it")) == named
