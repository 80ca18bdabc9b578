"""The image is pinned and runs without root; compose and Kubernetes files match the daemon."""

import asyncio
import re
import shutil
import textwrap
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import msgspec
import yaml

from tests.support.database import Database
from tests.support.tools import run_program
from webhookd.core.settings import Settings
from webhookd.embedded.installation import wheel_installations

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text("utf-8")
VARIABLES = {
    f"WEBHOOKD_{section.name}_{key.name}".upper()
    for section in msgspec.structs.fields(Settings)
    for key in msgspec.structs.fields(section.type)
}
GRACE_SECONDS = Settings().services.shutdown_grace_seconds


def pins(path: Path) -> dict[str, set[str]]:
    """Return the pinned versions of a lock file with the hashes of their files."""
    entries = re.split(r"\n(?=\S)", path.read_text("utf-8"))
    return {
        re.split(r"[ ;\\]", entry)[0]: set(re.findall(r"--hash=(\S+)", entry))
        for entry in entries
        if "==" in entry.partition("\n")[0]
    }


def compose() -> Any:
    """Return the services of the compose file."""
    return yaml.safe_load((DEPLOY / "compose.yml").read_text("utf-8"))["services"]


def kubernetes() -> dict[str, Any]:
    """Return the specifications of the Kubernetes manifest, by kind."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text("utf-8"))
    return {document["kind"]: document["spec"] for document in documents}


def test_image_installs_tested_versions() -> None:
    """Each pin is in the lock of the tests, with the same hashes, and every dependency is pinned."""
    tested = pins(ROOT / "tests" / "requirements.lock")
    run, build = pins(DEPLOY / "requirements.lock"), pins(DEPLOY / "build.lock")
    for pin, hashes in (run | build).items():
        assert hashes, pin
        assert hashes == tested.get(pin), pin
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for wanted, pinned in (
        (project["project"]["dependencies"], run),
        (project["build-system"]["requires"], build),
    ):
        names = {re.split(r"[^\w.-]", requirement)[0] for requirement in wanted}
        assert names <= {pin.partition("==")[0] for pin in pinned}


def test_last_stage_contains_no_build_tools() -> None:
    """It runs as a numeric user without an installer, stops by SIGTERM, and copies existing files only."""
    *earlier, last = re.split(r"^FROM .*$", CONTAINERFILE, flags=re.MULTILINE)
    assert not re.search(r"\bpip\b|apt-get", last)
    assert re.search(r"^USER (\d+):\d+$", last, re.MULTILINE)
    assert "\nSTOPSIGNAL SIGTERM\n" in last
    assert "/healthz" in last
    assert all("--require-hashes" in line for line in _installs("".join(earlier)) if "--no-index" not in line)
    needed = (DEPLOY / "Containerfile.dockerignore").read_text("utf-8").splitlines()
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.MULTILINE):
        for name in copied.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}" in needed


def test_environment_variables_are_settings() -> None:
    """The daemon knows every WEBHOOKD_ variable of the compose and Kubernetes files."""
    text = (DEPLOY / "compose.yml").read_text("utf-8") + (DEPLOY / "kubernetes.yml").read_text("utf-8")
    named = set(re.findall(r"\bWEBHOOKD_[A-Z_]+", text))
    assert named
    assert named <= VARIABLES


def test_stop_timeout_allows_drain() -> None:
    """Compose and Kubernetes wait longer than the default drain."""
    assert int(compose()["webhookd"]["stop_grace_period"].removesuffix("s")) > GRACE_SECONDS
    pod = kubernetes()["Deployment"]["template"]["spec"]
    [container] = pod["containers"]
    [*_, before] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > GRACE_SECONDS + int(before)


def test_liveness_does_not_depend_on_database() -> None:
    """Liveness uses /healthz, which needs no database; readiness uses /readyz."""
    [container] = kubernetes()["Deployment"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


async def test_compose_creates_working_login(database: Database) -> None:
    """The script creates a login with the rights of the daemon, and can run twice."""
    [command] = compose()["login"]["command"]
    name = f"{database.cluster.prefix}_compose"
    script = re.search(r"<<'SQL'\n(.*)^SQL$", textwrap.dedent(command), re.DOTALL | re.MULTILINE)
    assert script is not None
    psql = shutil.which("psql") or str(next(wheel_installations()).program("psql"))
    try:
        for _ in range(2):
            await asyncio.to_thread(
                run_program,
                psql,
                "--no-psqlrc",
                "--set=ON_ERROR_STOP=1",
                database.dsn("superuser"),
                stdin=script[1].replace("webhookd_daemon", name),
                DAEMON_PASSWORD="it's",
            )
        parts = urlsplit(database.dsn("daemon"))
        netloc = f"{name}:it%27s@{parts.netloc.rpartition('@')[2]}"
        connection = await asyncpg.connect(urlunsplit(parts._replace(netloc=netloc)), timeout=30)
        try:
            assert await connection.fetchval("select webhookd.publish('a.b', '{}')") == 1
        finally:
            await connection.close(timeout=30)
    finally:
        superuser = await database.connect("superuser")
        await superuser.execute(f"drop role if exists {name}")


def _installs(text: str) -> list[str]:
    """Return the commands that install packages, one per line."""
    return [
        part
        for part in re.split(r"&&|\n", text.replace("\\\n", " "))
        if re.search(r"\bpip\b.* install ", part)
    ]
