"""Run the commands of README.md and docs/*.md as they are written, in a copy of the repository.

Only addresses differ: free ports for 8470 and 8471, this test's server for localhost:5432, and an endpoint of
this test for https://customer.example/hook. One installation, one server and one daemon serve all pages.
"""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.certificates import Certificates
from tests.support.embedded import Home
from tests.support.endpoint import Endpoint
from tests.support.installations import installation_near
from tests.support.pages import DOCS, README, ROOT, blocks, fences
from tests.support.postgres import LocalServer, free_port
from tests.support.tools import run_program
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS
from tests.unit.test_docs import TEST_COMMAND
from tests.unit.test_wheel import repository_files
from webhookd.embedded.installation import wheel_installations

# The server is the test's own, so every selected PostgreSQL would repeat the same.
pytestmark = pytest.mark.once

INSTALL_TIMEOUT_SECONDS = 300
COMPILE_TIMEOUT_SECONDS = 300
README_SECTIONS = ("Try it", "Publish", "Receive", "Use your own PostgreSQL")
RECEIVERS = ROOT / "docs" / "receivers.md"


class Terminals:
    """Terminals of a new user: each command runs in the folder of the README, with bash."""

    def __init__(self, folder: Path, data_dir: Path, environment: dict[str, str] | None = None) -> None:
        self.api_port, self.listen_port = free_port(), free_port()
        self.replacements = {
            ":8470": f":{self.api_port}",
            "webhookd listen": f"webhookd listen --port {self.listen_port}",
        }
        self._folder = folder
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("WEBHOOKD_", "PG"))
        }
        self._environment = inherited | {
            "PATH": f"{folder / '.venv' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "WEBHOOKD_API_LISTEN": f"127.0.0.1:{self.api_port}",
            "WEBHOOKD_DATABASE_DATA_DIR": str(data_dir),
        }
        self._environment |= environment or {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def export(self, block: str) -> str:
        """Keep the exports of a block for later commands; return the rest of the block."""
        for name, value in re.findall(r"^export (\w+)='(.*)'$", self._replaced(block), re.MULTILINE):
            self._environment[name] = value
        return re.sub(r"^export .*\n", "", block, flags=re.MULTILINE)

    def run(self, block: str, timeout_seconds: float = CONDITION_TIMEOUT_SECONDS) -> str:
        """Run a block to its end; every command must succeed. Return its output."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._replaced(block)],
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

    def start(self, name: str, command: str) -> subprocess.Popen[bytes]:
        """Start a command that keeps running, with its output in a file of this name."""
        with self._file(name).open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self._replaced(command)}"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._processes.append(process)
        return process

    def output(self, name: str) -> str:
        return self._file(name).read_text()

    def close(self) -> None:
        """Stop the commands that still run."""
        for process in self._processes:
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
        """Wait for an effect of the command with this name."""
        until(condition, lambda: self.output(name))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.output"

    def _replaced(self, text: str) -> str:
        for written, used in self.replacements.items():
            text = text.replace(written, used)
        return text


class Installation:
    """The README's "Use your own PostgreSQL", done: a server, two logins, a running daemon."""

    def __init__(self, terminals: Terminals, server: LocalServer) -> None:
        self.terminals = terminals
        self._server = server

    def psql(self, block: str, *login: str, database: str = "yours") -> str:
        """Run SQL as the superuser, or as the login whose name and password are given."""
        program = shutil.which("psql") or next(wheel_installations()).program("psql")
        dsn = self._server.dsn(database, *login)
        return run_program(str(program), "--no-psqlrc", "-v", "ON_ERROR_STOP=1", dsn, stdin=block)

    def sh(self, block: str) -> str:
        """Run a block of shell commands with the exports so far."""
        return self.terminals.run(self.terminals.export(block))

    def set_up(self) -> None:
        """Run the section's blocks in their order, wait until the daemon is ready, and publish an event."""
        section = "Use your own PostgreSQL"
        (make_admin, make_logins), (migrate, serve) = (
            blocks(README, language, section) for language in ("sql", "sh")
        )
        self.psql(make_admin, database="postgres")
        assert "up to date" in self.sh(migrate)
        self.psql(make_logins)
        *before, last = serve.splitlines()
        assert self.sh("\n".join([*before, ""]))
        self.terminals.start("serve", last)
        self.terminals.until(self.terminals.is_ready, "serve")
        # Pages look at event 1.
        self.sh("webhookd publish order.paid '{\"order\": 6}'")


@pytest.fixture(scope="module")
def checkout() -> Iterator[Path]:
    """Give a folder with the repository, in which the README's first command has installed webhookd."""
    home = Home()
    try:
        for name in repository_files():
            (home.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, home.folder / name)
        make, install, _ = blocks(README, "sh", "Try it")[0].split(" && ")
        Terminals(home.folder, home.data).run(f"{make} && {install}", INSTALL_TIMEOUT_SECONDS)
        yield home.folder
    finally:
        home.remove()


@pytest.fixture(scope="module")
def installation(checkout: Path, certificates: Certificates) -> Iterator[Installation]:
    """Give a daemon on a PostgreSQL of its own, that may deliver to this machine; the pages share it."""
    server = LocalServer(installation_near(18))
    server.start()
    terminals = Terminals(
        checkout,
        checkout / "unused",
        {
            "WEBHOOKD_DELIVERY_CA_FILE": str(certificates.ca_file),
            "WEBHOOKD_DELIVERY_ALLOW_NETWORKS": "127.0.0.0/8",
        },
    )
    try:
        with Endpoint(certificates.good) as customer:
            customer.echo_challenge()
            address = server.dsn().rpartition("@")[2].partition("/")[0]
            terminals.replacements |= {
                "localhost:5432": address,
                "https://customer.example/hook": customer.url("/hook"),
            }
            installation = Installation(terminals, server)
            installation.set_up()
            yield installation
            terminals.close()
    finally:
        terminals.close()
        server.stop()


def test_try_it(checkout: Path) -> None:
    """Serve, listen, publish: the first event arrives, and its signature is valid."""
    home = Home()
    terminals = Terminals(checkout, home.data)
    first, receive, send = blocks(README, "sh", "Try it")
    try:
        serving = terminals.start("serve-embedded", first.split(" && ")[-1])
        terminals.until(terminals.is_ready, "serve-embedded")
        listening = terminals.start("listen", receive)
        # An event that is published before the challenge is answered would not be routed.
        terminals.until(lambda: can_see_verified(terminals.api_port), "listen")
        answers = terminals.run(send)
        terminals.until(lambda: "evt_1" in terminals.output("listen"), "listen")
        assert "✓" in terminals.output("listen"), terminals.output("listen")
        assert '"order": 7' in terminals.output("listen")
        assert "order.paid" in answers
        listening.send_signal(signal.SIGINT)
        assert listening.wait(CONDITION_TIMEOUT_SECONDS) == 0
        server_id = home.running_server_id()
        serving.terminate()
        assert serving.wait(CONDITION_TIMEOUT_SECONDS) == 0
        Home.until_gone(server_id)
    finally:
        terminals.close()
        home.remove()


def test_publish_and_receive(installation: Installation) -> None:
    """An event by SQL is the same event by HTTP; a subscription is verified and gets the next one."""
    installation.psql(
        "CREATE TABLE orders (id bigint, paid boolean); GRANT ALL ON orders TO your_application;"
    )
    [publish], [post] = blocks(README, "sql", "Publish"), blocks(README, "sh", "Publish")
    installation.psql(publish, "your_application", "and a third")
    if shutil.which("curl"):
        assert '"duplicate":true' in installation.sh(post)
    [receive] = blocks(README, "sh", "Receive")
    assert "whsec_" in installation.sh(receive)
    installation.sh("webhookd publish order.paid '{\"order\": 8}'")
    delivered = "webhookd deliveries list --status Completed --json"
    until(lambda: '"event_id"' in installation.sh(delivered), lambda: installation.terminals.output("serve"))


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_commands_of_page_succeed(installation: Installation, page: Path) -> None:
    """Every shell and SQL block of the page runs without an error, in its order."""
    before = dict(installation.terminals._environment)
    try:
        for language, block in fences(page):
            if language == "sh" and ("curl" not in block or shutil.which("curl")):
                installation.sh(block)
            elif language == "sql":
                installation.psql(block)
    finally:
        installation.terminals._environment = before


# A first build compiles Go's net/http: 50 s on a busy machine.
@pytest.mark.parametrize("language", ["python", "js", pytest.param("go", marks=pytest.mark.nightly)])
def test_receiver_verifies_and_answers_challenge(
    installation: Installation, certificates: Certificates, language: str, tmp_path: Path
) -> None:
    """The example of docs/receivers.md is verified, gets an event, and refuses a forged one."""
    [program] = blocks(RECEIVERS, language)
    command = receiver_command(language, program, tmp_path)
    port = free_port()
    with tls_proxy(certificates.good, port) as tls_port:
        create = f"webhookd subscriptions create receiver.{language} https://127.0.0.1:{tls_port}/hook --json"
        subscription = json.loads(installation.sh(create))
        environment = {"WEBHOOKD_SECRET": subscription["secret"], "PORT": str(port)}
        with (tmp_path / "output").open("wb") as output:
            receiver = subprocess.Popen(
                command, env=os.environ | environment, stdout=output, stderr=output, cwd=tmp_path
            )
        try:
            until(lambda: can_connect(port), (tmp_path / "output").read_text)
            installation.sh(f"webhookd subscriptions verify {subscription['id']}")
            installation.sh(f"webhookd publish receiver.{language} '{{\"order\": 7}}'")
            until(
                lambda: f"receiver.{language}" in (tmp_path / "output").read_text(),
                lambda: installation.sh("webhookd deliveries list"),
            )
            assert forged_request_status(port) == 400
        finally:
            receiver.kill()
            receiver.wait()


def test_no_command_of_the_readme_is_left_out() -> None:
    """Every shell block of the README is in a section that is run above, or is the test command."""
    run = [block for heading in README_SECTIONS for block in blocks(README, "sh", heading)]
    assert sorted([*run, TEST_COMMAND]) == sorted(block for kind, block in fences(README) if kind == "sh")


def receiver_command(language: str, program: str, folder: Path) -> list[str]:
    """Write the program, and return the command that runs it; skip if its language is not installed."""
    if language == "python":
        (folder / "receiver.py").write_text(program)
        return [sys.executable, "receiver.py"]
    tool = {"js": "node", "go": "go"}[language]
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed, so the {language} receiver of docs/receivers.md cannot run")
    (folder / f"receiver.{language}").write_text(program)
    if language == "js":
        return ["node", "receiver.js"]
    # Built first: a killed `go run` would leave its child running.
    environment = os.environ | {"GO111MODULE": "off", "GOTOOLCHAIN": "local"}
    subprocess.run(
        ["go", "build", "-o", "receiver", "receiver.go"],
        cwd=folder,
        env=environment | ({} if "HOME" in environment else {"GOCACHE": str(folder / "cache")}),
        check=True,
        timeout=COMPILE_TIMEOUT_SECONDS,
    )
    return ["./receiver"]


@contextmanager
def tls_proxy(certificate: Path, port: int) -> Iterator[int]:
    """Give the port of a TLS server that passes every connection to a plain port of this machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):  # the socket was closed: the test is over
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def serve(connection: socket.socket) -> None:
        with (
            suppress(OSError),
            context.wrap_socket(connection, server_side=True) as outer,
            socket.create_connection(("127.0.0.1", port)) as inner,
        ):
            back = threading.Thread(target=copy, args=(inner, outer), daemon=True)
            back.start()
            copy(outer, inner)
            inner.shutdown(socket.SHUT_RDWR)
            back.join()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def forged_request_status(port: int) -> int:
    """Return the status that a receiver answers to a request with a wrong signature."""
    headers = {
        "webhook-id": "evt_1",
        "webhook-timestamp": str(int(time.time())),
        "webhook-signature": "v1,Zm9yZ2VkZm9yZ2VkZm9yZ2VkZm9yZ2VkZm9yZ2VkZm8=",
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CONDITION_TIMEOUT_SECONDS)
    with closing(connection):
        connection.request("POST", "/hook", b'{"order": 7}', headers)
        return connection.getresponse().status


def can_see_verified(api_port: int) -> bool:
    """Whether the daemon has a verified subscription."""
    with urllib.request.urlopen(f"http://127.0.0.1:{api_port}/v1/subscriptions?verified=true") as response:
        return bool(json.load(response)["items"])


def can_connect(port: int) -> bool:
    """Whether a program listens on a port of this machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False


def until(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Wait for a condition; fail with a text if it does not come true."""
    deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(POLL_INTERVAL_SECONDS)
