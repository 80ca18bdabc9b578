"""Every key there is: swapped by a reload, as some test shows, or named for the next start."""

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
from webhookd.daemon.reload import restart_needed

ROOT = Path(__file__).resolve().parents[3]
EVERY_KEY = {
    f"{section.name}.{key.name}"
    for section in msgspec.structs.fields(Settings)
    for key in msgspec.structs.fields(section.type)
}
AT_THE_START = {
    "database.dsn",
    "database.data_dir",
    "database.pool_size",
    "database.auto_migrate",
    "database.allow_unencrypted",
    "services.enabled",
    "api.listen",
    "api.health_listen",
}


def with_another(key: str) -> Settings:
    """The defaults, but for one key."""
    section, name = key.split(".")
    changed = msgspec.structs.replace(getattr(Settings(), section), **{name: object()})
    return msgspec.structs.replace(Settings(), **{section: changed})


def test_every_key_is_swapped_or_waits_for_a_restart() -> None:
    """A new key needs a test that swaps it, or a place in the list of the others."""
    for module in pkgutil.iter_modules(reload.__path__, f"{reload.__name__}."):
        importlib.import_module(module.name)
    assert SWAPPED | AT_THE_START == EVERY_KEY
    assert not SWAPPED & AT_THE_START


def test_exactly_the_keys_of_the_start_are_named() -> None:
    """One that changed is told of, one that was swapped is not."""
    named = {key for key in EVERY_KEY if restart_needed(Settings(), with_another(key))}
    assert named == AT_THE_START
    assert restart_needed(Settings(), Settings()) == []


def test_each_is_named_by_its_own_name() -> None:
    """As it is written in the file."""
    for key in AT_THE_START:
        assert restart_needed(Settings(), with_another(key)) == [key]


def test_the_repositorys_file_marks_them() -> None:
    """(restart) stands beside each of them in webhookd.toml, or beside its section, and nowhere else."""
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
    assert marked == AT_THE_START


async def test_a_key_of_the_start_is_named_and_left_alone(make_api: MakeApi, endpoint: Endpoint) -> None:
    """All of them changed at once: each told without its value, and the daemon goes on where it is."""
    api = await make_api()
    await api.subscribe(endpoint)
    daemon = api.daemon
    daemon.configure(
        database={"dsn": "postgresql://somebody:hunter2@127.0.0.1:1/nothing", "pool_size": 3},
        services={"enabled": ["api"]},
        api={"listen": f"127.0.0.1:{free_port()}"},
    )
    assert await daemon.reload()
    lines = [line["message"] for line in daemon.logged("restart webhookd to apply it")]
    assert {line.split(" ")[0].split(".")[0] for line in lines} == {"database", "services", "api"}
    assert "hunter2" not in "".join(daemon.said())
    assert (await api.event()).status == 202
    await endpoint.received(2)


async def test_a_key_of_the_start_is_named_as_long_as_it_waits(make_api: MakeApi) -> None:
    """Again at each reload, until the file says again what runs."""
    api = await make_api(database={"pool_size": 4})
    daemon = api.daemon
    for pool_size, named in ((5, 1), (5, 2), (4, 2)):
        daemon.configure(database={"pool_size": pool_size})
        assert await daemon.reload()
        assert len(daemon.logged("restart webhookd to apply it")) == named
