"""Processes of webhookd that start with all modules loaded, forked from a server process that loaded them.

Loading the modules takes a second of CPU time, nearly all of a daemon's start, and the tests start hundreds.
A forked process still has its own files, signals and exit code.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

# anyio imports the second when it runs.
MODULES = [
    "webhookd.cli.main",
    "webhookd.daemon.daemon",
    "webhookd.devtools.listen",
    "anyio._backends._asyncio",
    "tests.support.forked",
]


class Forked:
    """A command of webhookd with the methods of subprocess.Popen that the tests use."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        stdout: Path,
        stderr: Path,
    ) -> None:
        for written in (stdout, stderr):
            written.touch()  # so that tests can read them at once
        # multiprocessing keeps one fork server for this process, and ends it with this process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(MODULES)
        self._process = context.Process(
            target=_run, args=(arguments, str(folder), dict(environment), str(stdout), str(stderr))
        )
        self._process.start()
        self._lock = threading.Lock()  # only one thread may read the exit code

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with self._lock:
            return self._process.exitcode

    def wait(self) -> None:
        """Wait until it has ended."""
        with self._lock:
            self._process.join()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, but not after the end, when another process may have the same id."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL, as a power failure would."""
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], folder: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    """In the new process: set up files, folder and environment as a shell would."""
    from webhookd.cli.main import main  # noqa: PLC0415  the tests' own process does not run it
    from webhookd.daemon import status  # noqa: PLC0415

    # The objects of the fork server never become garbage, and looking at them would copy their pages.
    gc.freeze()
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        written = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(written, stream.fileno())
        os.close(written)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for entry in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        if (site := Path(entry) / "sitecustomize.py").is_file():
            # Python reads it before any other module; its patches also work on modules that are loaded.
            runpy.run_path(str(site))
    # Tests wait for the gauges that the monitor updates; in production 5 s are often enough.
    status.INTERVAL_SECONDS = 1.0
    sys.argv = ["webhookd", *arguments]
    main()
