"""The fast receiver of a run: nginx if it is installed, otherwise webhookd's own receiver process."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.support.certificates import Certificates
from tests.support.postgres import free_port
from webhookd.devtools.bench_load import Receiver, receiver_process

START_TIMEOUT_SECONDS = 10
END_TIMEOUT_SECONDS = 10
POLL_INTERVAL_SECONDS = 0.05

# One worker process, because all parts share two cores. The log has the arrival time in milliseconds and the
# correlation id, which is the time of publishing.
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


class NginxReceiver(Receiver):
    """nginx, with stub_status on a separate port."""

    name = "nginx"

    def __init__(self, port: int, log_path: Path, status_port: int) -> None:
        super().__init__(port, log_path)
        self._status_port = status_port
        self._status_requests = 0  # which nginx counts too

    async def requests(self) -> int:
        status = await asyncio.to_thread(self._status)
        self._status_requests += 1
        return parse_stub_status(status) - self._status_requests

    def _status(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._status_port}/", timeout=5) as answer:
            return str(answer.read().decode())


@contextlib.asynccontextmanager
async def fast_receiver(folder: Path, certificates: Certificates) -> AsyncIterator[Receiver]:
    """Start the fastest receiver that is installed."""
    own_folder = folder / "fast-receiver"
    own_folder.mkdir()
    program = nginx_program()
    if program is None:
        async with receiver_process(own_folder, certificates.good) as receiver:
            yield receiver
        return
    with _nginx(program, own_folder, certificates) as nginx:
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            while not await _is_up(nginx):  # noqa: ASYNC110  another process starts
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        yield nginx


@contextlib.contextmanager
def _nginx(program: str, folder: Path, certificates: Certificates) -> Iterator[NginxReceiver]:
    port, status_port, log_path = free_port(), free_port(), folder / "arrivals.log"
    configuration = folder / "nginx.conf"
    configuration.write_text(
        NGINX_CONFIGURATION.format(
            folder=folder, port=port, status_port=status_port, certificate=certificates.good, log=log_path
        )
    )
    process = subprocess.Popen(
        [program, "-c", str(configuration), "-p", str(folder)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # its error log has the same messages
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


async def _is_up(receiver: NginxReceiver) -> bool:
    try:
        await receiver.requests()
    except OSError:
        return False
    return True


def nginx_program() -> str | None:
    """Find nginx, which is often in a folder that only root has in its PATH."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def parse_stub_status(text: str) -> int:
    """The number of requests: the third number of the third line."""
    return int(text.splitlines()[2].split()[2])
