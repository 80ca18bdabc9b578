"""The one test command: `python3 tests/run.py [-- pytest arguments]`, with nothing but Python.

Makes .venv-test from tests/requirements.lock, then runs ruff, mypy, the import contracts, and
pytest for the oldest and for the newest PostgreSQL found, in parts. Exits 1 if any check failed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "tests" / "requirements.lock"
ENVIRONMENT = ROOT / ".venv-test"
PYTHON = str(ENVIRONMENT / "bin" / "python")
OLDEST_PYTHON = (3, 11)
OLDEST_POSTGRES = 15
# pytest stops its servers in this time, or is killed.
STOP_TIMEOUT_SECONDS = 30
NO_TESTS_SELECTED = 5
# The daemon's tests wait for processes half of their time: in that time the others run. What is marked `once`
# cannot differ by PostgreSQL, so that the first has a part more. The longest come first.
PARTS = {"all else": "not daemon", "the daemon": "daemon and not once"}
ONCE = {"once": "daemon and once"}
# The pytests of two majors side by side; the checks that read the code are done before one notices.
MAX_AT_ONCE = 4


@dataclass(frozen=True)
class Check:
    """A command to run, and the exit codes that mean it passed."""

    name: str
    command: list[str]
    passing_codes: tuple[int, ...] = (0,)
    shows_summary: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    check: Check
    passed: bool
    output: str
    duration_seconds: float
    empty: bool = False


class Children:
    """The checks that run at this moment, so that Ctrl-C can stop them in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def run(self, check: Check) -> Outcome:
        """Run a check to its end, keeping what it prints."""
        started = time.monotonic()
        with self._lock:
            if self._stopping:
                return Outcome(check, passed=False, output="stopped", duration_seconds=0)
            process = subprocess.Popen(
                check.command,
                cwd=ROOT,
                env=surroundings(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                # Ctrl-C reaches this process alone, which passes it on once, to each child.
                start_new_session=True,
            )
            self._running.add(process)
        output, _ = process.communicate()
        with self._lock:
            self._running.discard(process)
        passed = process.returncode in check.passing_codes
        empty = process.returncode == NO_TESTS_SELECTED
        return Outcome(check, passed, output, time.monotonic() - started, empty)

    def stop(self) -> None:
        """Interrupt every running check, and kill those which do not end."""
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for process in running:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        for process in running:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def main(arguments: list[str]) -> int:
    """Make the environment, run every check, and return the exit code."""
    if sys.version_info < OLDEST_PYTHON:
        print("webhookd needs Python 3.11 or newer; this is", sys.version.split()[0])
        return 1
    # A terminated run stops its children just as an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for_pytest = pytest_arguments(arguments)
        make_environment()
        checks = [*static_checks(), *pytest_checks(find_postgres(), for_pytest)]
        return run_all(checks)
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}")
        return 1
    except KeyboardInterrupt:
        print("stopped")
        return 130


def pytest_arguments(arguments: list[str]) -> list[str]:
    """Return what stands after `--`, and refuse anything before it."""
    if arguments and arguments[0] != "--":
        raise SystemExit("usage: python3 tests/run.py [-- pytest arguments]")
    return arguments[1:]


def surroundings() -> dict[str, str]:
    """Return our environment variables without those of another Python environment.

    And without the wish to keep no bytecode: each of a thousand processes would compile webhookd anew.
    """
    foreign = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "MYPYPATH", "__PYVENV_LAUNCHER__"}
    foreign |= {"PYTHONDONTWRITEBYTECODE"}
    return {key: value for key, value in os.environ.items() if key not in foreign}


def make_environment() -> None:
    """Make .venv-test if it is absent, half-made, or of another lock, Python or place."""
    once("locked packages", [LOCK.read_text(), sys.version, sys.base_prefix, str(ROOT)], make_anew)
    project = [(ROOT / name).read_text() for name in ("pyproject.toml", "webhookd/__init__.py")]
    once("webhookd itself", project, install_project)


def once(name: str, inputs: list[str], make: Callable[[], None]) -> None:
    """Call `make`, unless a stamp says that it was done with these inputs."""
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    stamp = ENVIRONMENT / f"{name.replace(' ', '-')}.stamp"
    if stamp.is_file() and stamp.read_text() == digest:
        return
    print(f"installing {name} into {ENVIRONMENT.name}", flush=True)
    make()
    # Written last: what was interrupted has no stamp, and is made anew.
    stamp.write_text(digest)


def make_anew() -> None:
    """Make the environment from nothing but the lock."""
    if ENVIRONMENT.exists():
        shutil.rmtree(ENVIRONMENT)
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True, env=surroundings())
    # Without dependencies: an older pip looks for some past the lock, which is whole, as is checked.
    pip("--no-deps", "--require-hashes", "-r", str(LOCK))
    subprocess.run([PYTHON, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL, env=surroundings())


def install_project() -> None:
    """Install the project by reference, built with the lock's hatchling and no other."""
    pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))


def pip(*arguments: str) -> None:
    """Install with the environment's own pip."""
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True, env=surroundings())


def find_postgres() -> list[int]:
    """Return the PostgreSQL majors to test with: the oldest and the newest found."""
    command = [PYTHON, "-m", "tests.support.sources"]
    answer = subprocess.run(
        command, cwd=ROOT, env=surroundings(), capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise SystemExit(answer.stderr.strip())
    found = json.loads(answer.stdout)
    if not found:
        raise SystemExit("no PostgreSQL was found; tests/support/sources.py says where it may be")
    matrix = [found[0]] if len(found) == 1 else [found[0], found[-1]]
    origins = " and ".join(f"{source['major']} ({source['origin']})" for source in matrix)
    if matrix[0]["major"] == OLDEST_POSTGRES:
        print(f"PostgreSQL {origins}", flush=True)
    else:
        print(f"PostgreSQL {OLDEST_POSTGRES} is not tested; used instead: {origins}", flush=True)
    return [source["major"] for source in matrix]


def static_checks() -> list[Check]:
    """Return the checks that read the code. As modules: a script's first line bears no spaces."""
    module = [PYTHON, "-m"]
    contracts = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return [
        Check("ruff check", [*module, "ruff", "check", "."]),
        Check("ruff format", [*module, "ruff", "format", "--check", "."]),
        Check("import contracts", [PYTHON, "-c", contracts]),
        Check("mypy", [*module, "mypy"]),
    ]


def pytest_checks(majors: list[int], arguments: list[str]) -> list[Check]:
    """Return the pytests of each major: of the first they run everything, of the next what differs by it."""
    of_first = [
        pytest_check(major, part, marked, arguments)
        for major in majors[:1]
        for part, marked in (PARTS | ONCE).items()
    ]
    of_others = [
        pytest_check(major, part, f"postgres and not once and {marked}", arguments)
        for major in majors[1:]
        for part, marked in PARTS.items()
    ]
    return of_first + of_others


def pytest_check(major: int, part: str, marked: str, arguments: list[str]) -> Check:
    """Return one pytest. Several run at once, and must not write one cache."""
    command = [PYTHON, "-m", "pytest", f"--postgres={major}", "-m", marked, *arguments]
    cache = f".pytest_cache/pg{major}-{part.replace(' ', '-')}"
    return Check(
        f"pytest, PostgreSQL {major}, {part}",
        [*command, "-o", f"cache_dir={cache}"],
        # The arguments may have left no test in this part.
        (0, NO_TESTS_SELECTED),
        shows_summary=True,
    )


def run_all(checks: list[Check]) -> int:
    """Run the checks side by side, reporting each as it ends; return the exit code."""
    print(f"running {len(checks)} checks; the tests take some minutes", flush=True)
    children = Children()
    failed = 0
    tested = False
    with ThreadPoolExecutor(max_workers=MAX_AT_ONCE) as executor:
        futures = [executor.submit(children.run, check) for check in checks]
        try:
            for future in as_completed(futures):
                outcome = future.result()
                report(outcome)
                failed += not outcome.passed
                tested |= outcome.check.shows_summary and not outcome.empty
        except BaseException:
            children.stop()
            raise
    if not tested:
        print("no test was selected")
        return 1
    count = len(checks)
    print(f"{failed} of {count} checks failed" if failed else f"all {count} checks passed")
    return 1 if failed else 0


def report(outcome: Outcome) -> None:
    """Print one line about a check, and all it printed if it failed."""
    if not outcome.passed:
        print(outcome.output.rstrip())
    word = "passed" if outcome.passed else "FAILED"
    line = f"{outcome.check.name}: {word}, {outcome.duration_seconds:.1f} s"
    lines = outcome.output.strip().splitlines()
    if outcome.check.shows_summary and lines:
        line += f" ({lines[-1].strip('= ')})"
    print(line, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
