"""Runs a real `webhookd serve` process: starts and stops it, sends requests, reads its log."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.forked import Forked
from tests.support.postgres import free_port
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from webhookd.embedded.installation import Account

POLL_INTERVAL_SECONDS = 0.02
RELOADS = "webhookd_config_reloads_total"


class DaemonProcess:
    """One instance with its own configuration file."""

    def __init__(
        self,
        folder: Path,
        dsn: str,
        environment: Mapping[str, str] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.config_path = folder / "webhookd.toml"
        self.log_path = folder / "log.jsonl"
        self.environment = dict(environment or {})  # in addition to the environment of the tests
        self.python = sys.executable
        self.account: Account | None = None  # run as this user instead of the user of the tests
        self.is_forked = False  # start it from a process that has imported its modules already
        self.token: str | None = None  # for requests, if api.tokens is set; needs the scope read
        self._sections: dict[str, dict[str, Any]] = {
            "database": {"dsn": dsn},
            "api": {"listen": f"127.0.0.1:{self.port}"},
            "log": {"format": "json", "level": "debug"},
        }
        self.configure(**sections)
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def configure(self, **sections: dict[str, Any]) -> None:
        """Change the file; a running daemon reads it at `reload`."""
        for name, values in sections.items():
            self._sections.setdefault(name, {}).update(values)
        lines = []
        for name, values in self._sections.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        self.put("\n".join(lines) + "\n")

    def put(self, text: str) -> None:
        """Replace the file atomically, so that a daemon never reads half of it."""
        new = self.config_path.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)  # it contains a password
        new.replace(self.config_path)

    async def start(self, *options: str) -> Self:
        """Start it and wait until it is ready."""
        self.launch(*options)
        await self.until(lambda: self.get("/readyz")[0] == 200, "ready")
        return self

    def launch(self, *options: str) -> None:
        """Start it without waiting."""
        arguments = ["--config", str(self.config_path), "serve", *options]
        environment = os.environ | self.environment
        if self.is_forked and self.account is None and self.python == sys.executable:
            self._process = Forked(
                arguments, self.folder, environment, stdout=self.log_path, stderr=self.log_path
            )
            return
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [self.python, "-m", "webhookd", *arguments],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment,
                user=self.account.user_id if self.account else None,
                group=self.account.group_id if self.account else None,
                extra_groups=[] if self.account else None,
            )

    @property
    def process(self) -> subprocess.Popen[bytes] | Forked:
        assert self._process is not None
        return self._process

    # Signals and shutdown.

    def sighup(self) -> None:
        """Ask for a reload."""
        self.process.send_signal(signal.SIGHUP)

    async def reload(self) -> bool:
        """Reload, and return whether the file was accepted."""
        before = self.metric(RELOADS)
        self.sighup()
        await self.until(lambda: self.metric(RELOADS) > before, "reloaded")
        return self.metric("webhookd_config_last_reload_successful") == 1

    def sigterm(self) -> None:
        """Ask for a graceful shutdown."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()

    async def ended(self) -> int:
        """Wait until it exits, and return its exit code."""
        await self.until(lambda: self.process.poll() is not None, "ended")
        code = self.process.returncode
        assert code is not None
        return code

    def stop(self) -> None:
        """Kill it if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    # Requests.

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body; status 0 without a response."""
        return self._request(path)

    def get_json(self, path: str) -> Any:
        """Return the document of a response, which must have status 200."""
        status, body = self.get(path)
        assert status == 200, (status, body)
        return json.loads(body)

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        """Send these bytes as JSON, and return status and document."""
        status, response = self._request(path, body)
        return status, json.loads(response)

    def post_json(self, path: str, body: object) -> tuple[int, Any]:
        """Send a value as JSON, and return status and document."""
        return self.post(path, json.dumps(body).encode())

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(value for found, value in self._samples(name) if wanted <= found)

    # Log and memory.

    def output_lines(self) -> list[str]:
        """Return the complete lines of its output."""
        complete, _, _partial_line = self.log_path.read_text().rpartition("\n")
        return complete.splitlines()

    def logged(self, message: str) -> list[dict[str, Any]]:
        """Return the log lines whose message contains this text."""
        lines = [json.loads(line) for line in self.output_lines() if line.startswith("{")]
        return [line for line in lines if message in line["message"]]

    def faults(self) -> list[dict[str, Any]]:
        """Return the log lines of level error; an unavailable database is only a warning."""
        return [line for line in self.logged("") if line["level"] == "error"]

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        status = Path(f"/proc/{self.process.pid}/status")
        if status.is_file():
            [kibibytes] = [line.split()[1] for line in status.read_text().splitlines() if "VmRSS:" in line]
        else:
            command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
            kibibytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(kibibytes) * 1024

    async def until(self, condition: Any, what: str) -> None:
        """Wait for a condition, which is checked in a thread."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONDITION_TIMEOUT_SECONDS
        while not await asyncio.to_thread(condition):
            if loop.time() > deadline or (self.process.poll() is not None and what != "ended"):
                raise AssertionError(
                    f"not {what}: exit {self.process.poll()}\n{self.log_path.read_text()[-3000:]}"
                )
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    def _request(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=CONDITION_TIMEOUT_SECONDS) as response:  # noqa: S310  http to the daemon
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def _samples(self, name: str) -> Iterator[tuple[set[str], float]]:
        status, body = self.get("/metrics")
        assert status == 200, status
        for line in body.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            found, _, labels = sample.partition("{")
            if found == name:
                yield set(labels.rstrip("}").split(",")), float(value)


def _toml(value: Any) -> str:
    """Strings, numbers and booleans are written as in JSON; tables are not."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(part)}' for key, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return json.dumps(value)
