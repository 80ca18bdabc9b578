"""Runs a real `webhookd listen` process, reads its output, and sends requests to it."""

import asyncio
import json
import os
import re
import signal
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.forked import Forked
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS
from webhookd.outbound.signatures import sign


class ListenerProcess:
    """A receiver. Its data folder has the certificate that its daemon must trust."""

    def __init__(self, folder: Path, data_dir: Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._ca_file = data_dir / "certificate" / "certificate.pem"
        self._environment = {"WEBHOOKD_DATABASE_DATA_DIR": str(data_dir)} | dict(environment or {})
        self._process: Forked | None = None

    async def start(self, *arguments: str) -> Self:
        """Start it and wait until it is ready."""
        self.launch(*arguments)
        await self._until(lambda: re.search(r"^(Next|Ready)", self.stderr(), re.MULTILINE), "ready")
        return self

    def launch(self, *arguments: str) -> None:
        """Start it without waiting."""
        self._folder.mkdir(exist_ok=True)
        stdout, stderr = self._folder / "stdout", self._folder / "stderr"
        for written in (stdout, stderr):
            written.unlink(missing_ok=True)
        environment = os.environ | self._environment
        self._process = Forked(
            ["listen", *arguments], self._folder, environment, stdout=stdout, stderr=stderr
        )

    @property
    def process(self) -> Forked:
        assert self._process is not None
        return self._process

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    async def ended(self) -> int:
        """Wait until it exits, and return its exit code."""
        await self._until(lambda: self.process.poll() is not None, "ended")
        code = self.process.returncode
        assert code is not None
        return code

    def stop(self) -> None:
        """Kill it if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    @property
    def url(self) -> str:
        found = re.search(r"^Listening on (\S+)", self.stderr(), re.MULTILINE)
        assert found, self.stderr()
        return found[1]

    def lines(self) -> list[Any]:
        """Return the documents printed with --json."""
        return [json.loads(line) for line in self.stdout().splitlines(keepends=True) if line.endswith("\n")]

    async def deliveries(self, count: int) -> list[Any]:
        """Wait for `count` deliveries printed with --json, and return them without challenges."""

        def found() -> list[Any]:
            return [line for line in self.lines() if not line["challenge"]]

        await self._until(lambda: len(found()) >= count, f"{count} deliveries")
        return found()

    async def prints(self, text: str) -> str:
        """Wait until it has printed this text, and return everything printed so far."""
        await self._until(lambda: text in self.stdout(), f"printed {text!r}")
        return self.stdout()

    def send(
        self, body: bytes, secret: str | None = None, message_id: str = "evt_1", **headers: str
    ) -> tuple[int, bytes]:
        """Send a message, signed if a secret is given; header names are written with underscores."""
        now = int(time.time())
        given = {"webhook-id": message_id, "webhook-timestamp": str(now)}
        if secret is not None:
            given["webhook-signature"] = sign([secret], message_id, now, body)
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url, body, given)  # noqa: S310  https
        tls = ssl.create_default_context(cafile=self._ca_file)
        try:
            with urllib.request.urlopen(request, timeout=10, context=tls) as response:  # noqa: S310  https
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    async def _until(self, condition: Callable[[], object], what: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONDITION_TIMEOUT_SECONDS
        while not condition():
            if loop.time() > deadline or (self.process.poll() is not None and what != "ended"):
                raise AssertionError(
                    f"not {what}: exit {self.process.poll()}\n{self.stderr()}{self.stdout()}"
                )
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
