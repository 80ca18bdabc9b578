"""The README's commands, as they stand there: in a copy of the repository, from nothing but Python.

Only places are others: free ports for 8470 and 8471, and this test's server for localhost:5432.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.embedded import Home
from tests.support.installations import installation_near
from tests.support.postgres import LocalServer, free_port
from tests.support.tools import content
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS
from tests.unit.test_wheel import ROOT, repository_files
from webhookd.embedded.installation import wheel_installations

README, TRANSLATED = "README.md", "README.zh-TW.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Not run here, for it runs this; .ci/run is that very command.
TEST_COMMAND = "python3 tests/run.py\n"
INSTALL_TIMEOUT_SECONDS = 300


def fences(path: str) -> list[tuple[str, str]]:
    """Every block of a page: its language and its text."""
    return FENCE.findall((ROOT / path).read_text("utf-8"))


def blocks(language: str, heading: str) -> list[str]:
    """The blocks of one section, in order."""
    section = (ROOT / README).read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = [text for kind, text in FENCE.findall(section) if kind == language]
    assert found, heading
    return found


class Terminals:
    """A newcomer's: each command in the folder of the README, with bash."""

    def __init__(self, folder: Path, home: Home) -> None:
        self.api_port, self.receiver_port = free_port(), free_port()
        self._folder = folder
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("WEBHOOKD_", "PG"))
        } | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "WEBHOOKD_API_LISTEN": f"127.0.0.1:{self.api_port}",
            "WEBHOOKD_DATABASE_DATA_DIR": str(home.data),
        }
        self._open: list[subprocess.Popen[bytes]] = []

    def export(self, block: str) -> str:
        """Take the block's exports over for what follows; the rest of it."""
        for name, value in re.findall(r"^export (\w+)='(.*)'$", block, re.MULTILINE):
            self._environment[name] = value
        return re.sub(r"^export .*\n", "", block, flags=re.MULTILINE)

    def run(self, block: str, timeout_seconds: float = CONDITION_TIMEOUT_SECONDS) -> str:
        """Run a block to its end, each of its commands a success; what it said."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._placed(block)],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )
        assert done.returncode == 0, f"{block}{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def open(self, name: str, command: str) -> subprocess.Popen[bytes]:
        """Start a command that goes on, in a terminal of its own; what it says is in a file of its name."""
        with self._said(name).open("wb") as said:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self._placed(command)}"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        self._open.append(process)
        return process

    def said(self, name: str) -> str:
        return self._said(name).read_text()

    def close(self) -> None:
        """End what is still open."""
        for process in self._open:
            if process.poll() is None:
                process.terminate()
                process.wait(CONDITION_TIMEOUT_SECONDS)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.api_port}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def until(self, condition: Callable[[], bool], name: str) -> None:
        """Wait for something that the command of this name brings about."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.said(name)
            time.sleep(POLL_INTERVAL_SECONDS)

    def _said(self, name: str) -> Path:
        return self._folder / f"{name}.said"

    def _placed(self, text: str) -> str:
        receiving = text.replace("webhookd listen", f"webhookd listen --port {self.receiver_port}")
        return receiving.replace(":8470", f":{self.api_port}")


@pytest.fixture(scope="module")
def checkout() -> Iterator[Path]:
    """Give a folder in which the first two parts of the README's first command were done."""
    home = Home()
    try:
        for name in repository_files():
            (home.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, home.folder / name)
        make, install, _ = blocks("sh", "Try it")[0].split(" && ")
        Terminals(home.folder, home).run(f"{make} && {install}", INSTALL_TIMEOUT_SECONDS)
        yield home.folder
    finally:
        home.remove()


@pytest.fixture
def home() -> Iterator[Home]:
    """Give a data folder for the embedded server."""
    home = Home()
    yield home
    home.remove()


@pytest.fixture
def terminals(checkout: Path, home: Home) -> Iterator[Terminals]:
    """Give terminals; what was opened in them ends before the data folder goes."""
    terminals = Terminals(checkout, home)
    yield terminals
    terminals.close()


def test_try_it(terminals: Terminals, home: Home) -> None:
    """Serve, listen, publish: the first event arrives, and its signature is right. Then the demo."""
    first, receive, send, demo = blocks("sh", "Try it")
    serving = terminals.open("serve", first.split(" && ")[-1])
    terminals.until(terminals.is_ready, "serve")
    listening = terminals.open("listen", receive)
    # Not at "Listening": what is published before its challenge is answered is not routed to it.
    terminals.until(lambda: "Now, elsewhere" in terminals.said("listen"), "listen")
    answers = terminals.run(send)
    terminals.until(lambda: "evt_1" in terminals.said("listen"), "listen")
    assert "✓" in terminals.said("listen"), terminals.said("listen")
    assert '"order": 7' in terminals.said("listen")
    assert "order.paid" in answers
    listening.send_signal(signal.SIGINT)
    assert listening.wait(CONDITION_TIMEOUT_SECONDS) == 0
    server_id = home.running_server_id()
    serving.terminate()
    assert serving.wait(CONDITION_TIMEOUT_SECONDS) == 0
    Home.until_gone(server_id)
    assert "requeue" in terminals.run(demo)


def test_your_own_postgresql(terminals: Terminals) -> None:
    """Migrate, check, serve; one event by SQL and by HTTP; a token; what an operator asks; a job done."""
    server = LocalServer(installation_near(18))
    server.start()
    try:
        address = server.dsn().rpartition("@")[2].partition("/")[0]

        def psql(block: str, dsn: str = "") -> str:
            program = shutil.which("psql") or next(wheel_installations()).program("psql")
            return content(program, "--no-psqlrc", "-v", "ON_ERROR_STOP=1", dsn or server.dsn(), said=block)

        def sh(block: str) -> str:
            return terminals.run(terminals.export(block.replace("localhost:5432", address)))

        (make_admin, make_logins), (migrate, serve) = (
            blocks(language, "Use the PostgreSQL you have") for language in ("sql", "sh")
        )
        psql(make_admin)
        assert "up to date" in sh(migrate)
        psql(make_logins)
        *before, last = serve.splitlines()
        assert sh("\n".join([*before, ""]))
        serving = terminals.open("serve", last)
        terminals.until(terminals.is_ready, "serve")

        database = server.dsn("yours")
        psql(
            "CREATE TABLE orders (id bigint, paid boolean); GRANT ALL ON orders TO your_application;",
            database,
        )
        [publish], [post] = blocks("sql", "Publish"), blocks("sh", "Publish")
        psql(publish, server.dsn("yours", "your_application", "and a third"))
        if shutil.which("curl"):
            assert '"duplicate":true' in sh(post)
        [token], [operate] = blocks("sh", "Configuration"), blocks("sh", "Operate")
        assert "sha256" in sh(token)
        assert "ready" in sh(operate)
        [jobs] = blocks("sh", "Jobs for your own workers")
        assert '"name": "Ada"' in (done := sh(jobs)) or '"name":"Ada"' in done
        assert "succeeded" in done
        serving.terminate()
        assert serving.wait(CONDITION_TIMEOUT_SECONDS) == 0
    finally:
        server.stop()


def test_every_command_is_one_of_these() -> None:
    """No section has commands that the tests above do not run; and the tests are what .ci/run runs."""
    tried = (
        "Try it",
        "Use the PostgreSQL you have",
        "Publish",
        "Configuration",
        "Operate",
        "Jobs for your own workers",
    )
    run = [block for heading in tried for block in blocks("sh", heading)]
    assert sorted([*run, TEST_COMMAND]) == sorted(text for kind, text in fences(README) if kind == "sh")
    assert (ROOT / ".ci" / "run").read_text().endswith(f"exec {TEST_COMMAND}")


def test_both_languages_show_the_same() -> None:
    """Every block and every heading's level of one page is in the other, in the same order."""
    assert fences(TRANSLATED) == fences(README)
    levels = [
        re.findall(r"^#+ ", (ROOT / page).read_text("utf-8"), re.MULTILINE) for page in (README, TRANSLATED)
    ]
    assert levels[0] == levels[1]
