"""A real `webhookd serve`, as a process with verbs."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.support.postgres import free_port

POLL_INTERVAL_SECONDS = 0.02
WAIT_TIMEOUT_SECONDS = 120


class DaemonProcess:
    """One instance with a configuration file of its own."""

    def __init__(self, folder: Path, dsn: str, **sections: dict[str, Any]) -> None:
        self.folder = folder
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

    def launch(self) -> None:
        """Start it, whatever becomes of it."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "webhookd", "--config", str(self.config_path), "serve"],
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    async def start(self) -> Self:
        """Start it, and return when it is ready."""
        self.launch()
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
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name
        )

    def logged(self, message: str) -> list[dict[str, Any]]:
        """The log lines with this message in them."""
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if message in line["message"]]

    def faults(self) -> list[dict[str, Any]]:
        """The log lines about our own faults: a database that is away is none."""
        return [line for line in self.logged("") if line["level"] == "error"]

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
