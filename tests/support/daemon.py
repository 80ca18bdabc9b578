"""A real `webhookd serve`, as a process with verbs."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.postgres import free_port

POLL_INTERVAL_SECONDS = 0.02
WAIT_TIMEOUT_SECONDS = 120


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
        self._environment = environment or {}  # beside our own
        self.port = free_port()
        self.config_path = folder / "webhookd.toml"
        self.log_path = folder / "log.jsonl"
        self._sections: dict[str, dict[str, Any]] = {
            "database": {"dsn": dsn},
            "api": {"listen": f"127.0.0.1:{self.port}"},
            "log": {"format": "json", "level": "debug"},
        }
        self.configure(**sections)
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, **sections: dict[str, Any]) -> None:
        """Change the file; a running daemon reads it at `sighup`."""
        for name, values in sections.items():
            self._sections.setdefault(name, {}).update(values)
        lines = []
        for name, values in self._sections.items():
            lines.append(f"[{name}]")
            # JSON's strings, numbers, booleans and lists are TOML's.
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        self.config_path.write_text("\n".join(lines) + "\n")

    async def start(self) -> Self:
        """Start it, and return when it is ready."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  a fork, and nothing to wait for
                [sys.executable, "-m", "webhookd", "--config", str(self.config_path), "serve"],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **self._environment},
            )
        await self.until(lambda: self.get("/readyz")[0] == 200, "ready")
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def sighup(self) -> None:
        """Have it reload."""
        self.process.send_signal(signal.SIGHUP)

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
        return self.process.returncode

    def get(self, path: str) -> tuple[int, bytes]:
        """What it answers; 0 while it does not."""
        return self._ask(path)

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        """What it answers to these very bytes, which say that they are JSON."""
        status, answer = self._ask(path, body)
        return status, json.loads(answer)

    def post_json(self, path: str, body: object) -> tuple[int, Any]:
        """What it answers to a value."""
        return self.post(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310  http, and to ourselves
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def get_json(self, path: str) -> Any:
        """What it says, which must be 200."""
        status, body = self.get(path)
        assert status == 200, (status, body)
        return json.loads(body)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name
        )

    def resident_bytes(self) -> int:
        """How much memory it has."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [kibibytes] = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(kibibytes) * 1024

    def logged(self, message: str) -> list[dict[str, Any]]:
        """The log lines with this message in them."""
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if message in line["message"]]

    async def until(self, condition: Any, what: str) -> None:
        """Wait for a condition, asked without blocking the loop."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_TIMEOUT_SECONDS
        while not await asyncio.to_thread(condition):
            if loop.time() > deadline or (self.process.poll() is not None and what != "ended"):
                raise AssertionError(
                    f"not {what}: exit {self.process.poll()}\n{self.log_path.read_text()[-3000:]}"
                )
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    def stop(self) -> None:
        """End it, whatever it does, at the end of a test."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
