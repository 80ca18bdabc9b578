"""A real `webhookd serve`, as a process with verbs."""

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
    """One instance with a configuration file of its own."""

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
        self.environment = dict(environment or {})  # beside the tests' own
        self.python = sys.executable
        self.account: Account | None = None  # another's than the tests'
        self.is_forked = False  # from a process that has read its modules already
        self.token: str | None = None  # to ask with, where tokens are set: one that may read
        self._sections: dict[str, dict[str, Any]] = {
            "database": {"dsn": dsn},
            "api": {"listen": f"127.0.0.1:{self.port}"},
            "log": {"format": "json", "level": "debug"},
        }
        self.configure(**sections)
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def configure(self, **sections: dict[str, Any]) -> None:
        """Change the file; a running daemon reads it at `sighup`."""
        for name, values in sections.items():
            self._sections.setdefault(name, {}).update(values)
        lines = []
        for name, values in self._sections.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        self.put("\n".join(lines) + "\n")

    def put(self, text: str) -> None:
        """Another file in the place of this one, at once: a daemon that reads meanwhile sees no half."""
        beside = self.config_path.with_suffix(".new")
        beside.write_text(text)
        beside.chmod(0o600)  # there is a password in it
        beside.replace(self.config_path)

    async def start(self, *options: str) -> Self:
        """Start it, and return when it is ready."""
        self.launch(*options)
        await self.until(lambda: self.get("/readyz")[0] == 200, "ready")
        return self

    def launch(self, *options: str) -> None:
        """Start it, whatever becomes of it."""
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

    # What an operator does.

    def sighup(self) -> None:
        """Have it reload."""
        self.process.send_signal(signal.SIGHUP)

    async def reload(self) -> bool:
        """Have it reload, and return when it has: whether it took the file."""
        before = self.metric(RELOADS)
        self.sighup()
        await self.until(lambda: self.metric(RELOADS) > before, "reloaded")
        return self.metric("webhookd_config_last_reload_successful") == 1

    def sigterm(self) -> None:
        """Have it drain and end."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()

    async def ended(self) -> int:
        """Its exit code, once it has one."""
        await self.until(lambda: self.process.poll() is not None, "ended")
        code = self.process.returncode
        assert code is not None
        return code

    def stop(self) -> None:
        """End it, whatever it does, at the end of a test."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    # What it is asked.

    def get(self, path: str) -> tuple[int, bytes]:
        """What it answers; 0 while it does not."""
        return self._ask(path)

    def get_json(self, path: str) -> Any:
        """What it says, which must be 200."""
        status, body = self.get(path)
        assert status == 200, (status, body)
        return json.loads(body)

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        """What it answers to these very bytes, which say that they are JSON."""
        status, answer = self._ask(path, body)
        return status, json.loads(answer)

    def post_json(self, path: str, body: object) -> tuple[int, Any]:
        """What it answers to a value."""
        return self.post(path, json.dumps(body).encode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples, or of those with these labels."""
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(value for found, value in self._samples(name) if wanted <= found)

    # What is seen of it.

    def said(self) -> list[str]:
        """All that it wrote, line by line."""
        written, _, _half_a_line = self.log_path.read_text().rpartition("\n")
        return written.splitlines()

    def logged(self, message: str) -> list[dict[str, Any]]:
        """The log lines with this message in them."""
        lines = [json.loads(line) for line in self.said() if line.startswith("{")]
        return [line for line in lines if message in line["message"]]

    def faults(self) -> list[dict[str, Any]]:
        """The log lines about our own faults: a database that is away is none."""
        return [line for line in self.logged("") if line["level"] == "error"]

    def resident_bytes(self) -> int:
        """How much memory it has."""
        status = Path(f"/proc/{self.process.pid}/status")
        if status.is_file():
            [kibibytes] = [line.split()[1] for line in status.read_text().splitlines() if "VmRSS:" in line]
        else:
            command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
            kibibytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(kibibytes) * 1024

    async def until(self, condition: Any, what: str) -> None:
        """Wait for a condition, asked without blocking the loop."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONDITION_TIMEOUT_SECONDS
        while not await asyncio.to_thread(condition):
            if loop.time() > deadline or (self.process.poll() is not None and what != "ended"):
                raise AssertionError(
                    f"not {what}: exit {self.process.poll()}\n{self.log_path.read_text()[-3000:]}"
                )
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    # Inside.

    def _ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=CONDITION_TIMEOUT_SECONDS) as answer:  # noqa: S310  http, and to ourselves
                return answer.status, answer.read()
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
    """JSON's strings, numbers and booleans are TOML's; its objects are not."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(part)}' for key, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return json.dumps(value)
