"""The receivers of a run, each in a process of its own: nginx where it is installed, and a small one of ours.

Hands on addresses, the number of requests so far, and the times of arrival at /timed.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.bench.children import Child, child, python
from tests.support.certificates import Certificates
from tests.support.postgres import free_port

START_TIMEOUT_SECONDS = 10
END_TIMEOUT_SECONDS = 10
POLL_INTERVAL_SECONDS = 0.05

# One process of it, for two cores are shared by everybody. The log has the time of arrival to a millisecond
# and the correlation id, in which a measure puts the time of publishing.
NGINX_CONFIGURATION = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 4096; }}
http {{
    log_format arrival '$msec $http_webhook_correlation_id';
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000000;
    keepalive_timeout 300s;
    server {{
        listen 127.0.0.1:{port} ssl backlog=1024;
        ssl_certificate {certificate};
        ssl_certificate_key {certificate};
        location / {{ return 200; }}
        location /timed {{ access_log {log} arrival; return 200; }}
    }}
    server {{
        listen 127.0.0.1:{status_port};
        location / {{ stub_status; }}
    }}
}}
"""


class Arrival(NamedTuple):
    """When a request came, and what its correlation id said."""

    at: float
    stamp: str


class Receiver(ABC):
    """A running receiver."""

    name: str

    def __init__(self, port: int, log_path: Path) -> None:
        self._port = port
        self._log_path = log_path

    def url(self, path: str) -> str:
        """An address of it."""
        return f"https://127.0.0.1:{self._port}{path}"

    @abstractmethod
    async def requests(self) -> int:
        """How many requests it has answered, or left without answer, since it began."""

    def arrivals(self, offset: int = 0) -> list[Arrival]:
        """What came to /timed since the log ended there."""
        with self._log_path.open() as log:
            log.seek(offset)
            return parse_arrivals(log.read())

    async def until_arrived(self, count: int, offset: int) -> list[Arrival]:
        """The same, once there are so many."""
        while len(arrivals := self.arrivals(offset)) < count:  # noqa: ASYNC110  another process writes
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        return arrivals

    def log_bytes(self) -> int:
        """Where the log ends now."""
        return self._log_path.stat().st_size if self._log_path.exists() else 0


class SmallReceiver(Receiver):
    """tests/bench/small_receiver.py."""

    name = "the small receiver of tests/bench"

    def __init__(self, port: int, log_path: Path, process: Child) -> None:
        super().__init__(port, log_path)
        self._process = process

    async def requests(self) -> int:
        return int(await self._process.ask("count"))


class NginxReceiver(Receiver):
    """nginx, with stub_status at a port of its own."""

    name = "nginx"

    def __init__(self, port: int, log_path: Path, status_port: int) -> None:
        super().__init__(port, log_path)
        self._status_port = status_port
        self._looks = 0

    async def requests(self) -> int:
        self._looks += 1
        return parse_stub_status(await asyncio.to_thread(self._status)) - self._looks

    def _status(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._status_port}/", timeout=5) as answer:
            return str(answer.read().decode())


@contextlib.asynccontextmanager
async def small_receiver(folder: Path, certificates: Certificates) -> AsyncIterator[SmallReceiver]:
    """Ours, for delays and for what never answers; and where there is no nginx."""
    port, log_path = free_port(), folder / "small-arrivals.log"
    given = {"certificate": str(certificates.good), "port": port, "log": str(log_path)}
    async with child(python("tests.bench.small_receiver"), folder, given) as process:
        yield SmallReceiver(port, log_path, process)


@contextlib.asynccontextmanager
async def fast_receiver(folder: Path, certificates: Certificates) -> AsyncIterator[Receiver]:
    """The fastest there is."""
    program = nginx_program()
    if program is None:
        own_folder = folder / "fast"
        own_folder.mkdir()
        async with small_receiver(own_folder, certificates) as small:
            yield small
        return
    with _nginx(program, folder, certificates) as receiver:
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            while not await _answers(receiver):  # noqa: ASYNC110  another process begins
                await asyncio.sleep(0.05)
        yield receiver


@contextlib.contextmanager
def _nginx(program: str, folder: Path, certificates: Certificates) -> Iterator[NginxReceiver]:
    port, status_port, log_path = free_port(), free_port(), folder / "arrivals.log"
    configuration = folder / "nginx.conf"
    # Its worker is another user's where root starts it; the log is opened by the master.
    configuration.write_text(
        NGINX_CONFIGURATION.format(
            folder=folder, port=port, status_port=status_port, certificate=certificates.good, log=log_path
        )
    )
    process = subprocess.Popen(
        [program, "-c", str(configuration), "-p", str(folder)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # it says the same in its error log
        start_new_session=True,
    )
    try:
        yield NginxReceiver(port, log_path, status_port)
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _answers(receiver: NginxReceiver) -> bool:
    try:
        await receiver.requests()
    except OSError:
        # Nobody counted this look.
        receiver._looks -= 1
        return False
    return True


def nginx_program() -> str | None:
    """Where nginx is: often in a folder that only root's PATH names."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def parse_stub_status(text: str) -> int:
    """The number of requests, of what nginx says: the third number of the third line."""
    return int(text.splitlines()[2].split()[2])


def parse_arrivals(text: str) -> list[Arrival]:
    """The arrivals of a log; its last line may be half-written, and a request may have no correlation id."""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [Arrival(float(at), stamp) for at, _, stamp in (line.partition(" ") for line in whole)]
