"""A real `webhookd serve`, as a process with verbs."""

import asyncio
import json
import os
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
RELOADS = "webhookd_config_reloads_total"


class DaemonProcess:
    """One instance with a configuration file of its own."""

    def __init__(self, folder: Path, dsn: str, **sections: dict[str, Any]) -> None:
        self.folder = folder
        self.port = free_port()
        self.config_path = folder / "webhookd.toml"
        self.log_path = folder / "log.jsonl"
        self.environment: dict[str, str] = {}  # beside the tests' own
        self.token: str | None = None  # to ask with, where tokens are set: one that may read
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
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        self.config_path.write_text("\n".join(lines) + "\n")

    async def start(self, *options: str) -> Self:
        """Start it, and return when it is ready."""
        self.launch(*options)
        await self.until(lambda: self.get("/readyz")[0] == 200, "ready")
        return self

    def launch(self, *options: str) -> None:
        """Start it, whatever becomes of it."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "webhookd", "--config", str(self.config_path), "serve", *options],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=os.environ | self.environment,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

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
        return self.process.returncode

    def get(self, path: str) -> tuple[int, bytes]:
        """What it answers; 0 while it does not."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:  # noqa: S310  it is http, see above
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples, or of those with a label: `outcome="done"`."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name and label in line
        )

    def said(self) -> list[str]:
        """All that it wrote, line by line."""
        return self.log_path.read_text().splitlines()

    def logged(self, message: str) -> list[dict[str, Any]]:
        """The log lines with this message in them."""
        lines = [json.loads(line) for line in self.said() if line.startswith("{")]
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


def _toml(value: Any) -> str:
    """JSON's strings, numbers and booleans are TOML's; its objects are not."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(part)}' for key, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return json.dumps(value)
