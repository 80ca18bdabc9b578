"""The gate: `python3 tests/run.py [--nightly] [-- pytest arguments]`. It needs only Python.

Creates .venv-test from tests/requirements.lock, then runs ruff, mypy, the import contracts and the tests. The
oldest PostgreSQL version found runs all tests but the nightly ones; the newest runs the tests that may differ
between versions. --nightly runs every test on both. Exits 1 if a check failed. Tests that need a program that
this machine lacks, such as a browser, are skipped; the summary says why.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "tests" / "requirements.lock"
ENVIRONMENT = ROOT / ".venv-test"
PYTHON = str(ENVIRONMENT / "bin" / "python")
OLDEST_PYTHON = (3, 11)
OLDEST_POSTGRES = 15
# pytest has this much time to stop its servers before it is killed.
STOP_TIMEOUT_SECONDS = 30
PROGRESS_INTERVAL_SECONDS = 30
NO_TESTS_SELECTED = 5
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] [^ ]+: (.+)$", re.MULTILINE)
# One pytest per part, side by side. Tests of the daemon wait for other processes half of the time; meanwhile
# the other parts use the CPU. The slowest part comes first; tests/conftest.py adds the markers.
PARTS = {
    "daemon": "daemon",
    "API and commands": "interfaces",
    "console": "console",
    "database and units": "not daemon and not interfaces and not console",
}
# The part of the newest PostgreSQL version. It must be last, because it is the shortest.
EACH_VERSION = "each_version"
# All five pytests of the gate, and beside them one static check after the other.
MAX_AT_ONCE = 6


@dataclass(frozen=True)
class Check:
    """A command to run, and the exit codes that mean it passed."""

    name: str
    command: list[str]
    passing_codes: tuple[int, ...] = (0,)
    is_pytest: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a check."""

    check: Check
    passed: bool
    output: str
    duration_seconds: float
    empty: bool = False

    @property
    def skipped(self) -> list[str]:
        """How many tests pytest skipped for each reason, as in `3 tests: PgBouncer is not installed here`."""
        if not self.check.is_pytest:
            return []
        counts: dict[str, int] = {}
        for count, reason in SKIPPED.findall(self.output):
            counts[reason] = counts.get(reason, 0) + int(count)
        return [f"{count} {'test' if count == 1 else 'tests'}: {why}" for why, count in counts.items()]


@dataclass
class Running:
    """A check that is running, and its output so far."""

    check: Check
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def progress(self) -> str:
        """The name of the check and the last percentage that pytest printed."""
        percentages = [found for line in self.lines for found in re.findall(r"\[ *(\d+%)\]", line)]
        return f"{self.check.name} {percentages[-1]}" if percentages else self.check.name


class Children:
    """Runs checks as child processes, and stops them when the run is interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Running] = []
        self._stopping = False

    def run(self, check: Check) -> Outcome:
        """Run a check until it ends."""
        started = time.monotonic()
        with self._lock:
            if self._stopping:
                return Outcome(check, passed=False, output="stopped", duration_seconds=0)
            process = subprocess.Popen(
                check.command,
                cwd=ROOT,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                # Only this process gets Ctrl-C; it sends one SIGINT to each child.
                start_new_session=True,
            )
            running = Running(check, process)
            self._running.append(running)
        assert process.stdout is not None
        running.lines.extend(process.stdout)
        process.wait()
        with self._lock:
            self._running.remove(running)
        return Outcome(
            check,
            passed=process.returncode in check.passing_codes,
            output="".join(running.lines),
            duration_seconds=time.monotonic() - started,
            empty=process.returncode == NO_TESTS_SELECTED,
        )

    def progress(self) -> str:
        """Return the checks that are running."""
        with self._lock:
            return ", ".join(running.progress for running in self._running)

    def stop(self) -> None:
        """Interrupt every running check; kill the checks that do not end."""
        with self._lock:
            self._stopping = True
            processes = [running.process for running in self._running]
        for process in processes:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        for process in processes:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def main(arguments: list[str]) -> int:
    """Create the environment, run every check, and return the exit code."""
    if sys.version_info < OLDEST_PYTHON:
        print("webhookd needs Python 3.11 or newer; this is", sys.version.split()[0])
        return 1
    # SIGTERM stops the children in the same way as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        nightly, for_pytest = parse(arguments)
        make_environment()
        majors = find_postgres()
        pytests = nightly_checks(majors, for_pytest) if nightly else gate_checks(majors, for_pytest)
        return run_all([*pytests, *static_checks()])
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}")
        return 1
    except KeyboardInterrupt:
        print("stopped")
        return 130


def parse(arguments: list[str]) -> tuple[bool, list[str]]:
    """Return whether to run the nightly tests too, and the arguments after `--`."""
    nightly = arguments[:1] == ["--nightly"]
    rest = arguments[1:] if nightly else arguments
    if rest and rest[0] != "--":
        raise SystemExit("usage: python3 tests/run.py [--nightly] [-- pytest arguments]")
    return nightly, rest[1:]


def child_environment() -> dict[str, str]:
    """Return our environment variables without those of another Python environment.

    PYTHONDONTWRITEBYTECODE goes too: a thousand processes would each compile webhookd again.
    """
    removed = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "MYPYPATH", "__PYVENV_LAUNCHER__"}
    removed |= {"PYTHONDONTWRITEBYTECODE"}
    return {key: value for key, value in os.environ.items() if key not in removed}


def make_environment() -> None:
    """Create .venv-test if it is missing, incomplete, or made from another lock, Python or folder."""
    once("locked packages", [LOCK.read_text(), sys.version, sys.base_prefix, str(ROOT)], install_packages)
    project = [(ROOT / name).read_text() for name in ("pyproject.toml", "webhookd/__init__.py")]
    once("webhookd itself", project, install_project)


def once(name: str, inputs: list[str], make: Callable[[], None]) -> None:
    """Call `make` unless its stamp file says that it succeeded with the same inputs."""
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    stamp = ENVIRONMENT / f"{name.replace(' ', '-')}.stamp"
    if stamp.is_file() and stamp.read_text() == digest:
        return
    print(f"installing {name} into {ENVIRONMENT.name}", flush=True)
    make()
    # Written last, so that an interrupted installation runs again.
    stamp.write_text(digest)


def install_packages() -> None:
    """Create a new environment with the packages of the lock."""
    if ENVIRONMENT.exists():
        shutil.rmtree(ENVIRONMENT)
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True, env=child_environment())
    # --no-deps: older versions of pip look for dependencies outside the lock. `pip check` finds missing ones.
    pip("--no-deps", "--require-hashes", "-r", str(LOCK))
    subprocess.run(
        [PYTHON, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL, env=child_environment()
    )


def install_project() -> None:
    """Install the project in editable mode, built with the hatchling of the lock."""
    pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))


def pip(*arguments: str) -> None:
    """Run `pip install` of the environment."""
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True, env=child_environment())


def find_postgres() -> list[int]:
    """Return the PostgreSQL versions to test with: the oldest and the newest found."""
    command = [PYTHON, "-m", "tests.support.sources"]
    answer = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise SystemExit(answer.stderr.strip())
    found = json.loads(answer.stdout)
    if not found:
        raise SystemExit("no PostgreSQL found; tests/support/sources.py lists where the tests look for it")
    matrix = [found[0]] if len(found) == 1 else [found[0], found[-1]]
    origins = " and ".join(f"{source['major']} ({source['origin']})" for source in matrix)
    if matrix[0]["major"] == OLDEST_POSTGRES:
        print(f"PostgreSQL {origins}", flush=True)
    else:
        print(f"PostgreSQL {OLDEST_POSTGRES} not found; testing with {origins}", flush=True)
    return [source["major"] for source in matrix]


def static_checks() -> list[Check]:
    """Return the checks that read the code."""
    # As modules, not as scripts: the first line of a script cannot name a folder with spaces.
    module = [PYTHON, "-m"]
    contracts = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return [
        Check("ruff check", [*module, "ruff", "check", "."]),
        Check("ruff format", [*module, "ruff", "format", "--check", "."]),
        Check("import contracts", [PYTHON, "-c", contracts]),
        Check("mypy", [*module, "mypy"]),
    ]


def gate_checks(majors: list[int], arguments: list[str]) -> list[Check]:
    """Return the pytests of the gate, slowest first."""
    first, *others = majors
    return [
        *(
            pytest_check(first, part, f"({markers}) and not nightly", arguments)
            for part, markers in PARTS.items()
        ),
        *(
            pytest_check(major, "differences", f"{EACH_VERSION} and not nightly", arguments)
            for major in others
        ),
    ]


def nightly_checks(majors: list[int], arguments: list[str]) -> list[Check]:
    """Return the pytests of `make nightly`: every test, and every test with a database on each version."""
    first, *others = majors
    return [
        *(pytest_check(first, part, markers, arguments) for part, markers in PARTS.items()),
        *(
            pytest_check(major, part, f"postgres and not once and ({markers})", arguments)
            for major in others
            for part, markers in PARTS.items()
        ),
    ]


def pytest_check(major: int, part: str, markers: str, arguments: list[str]) -> Check:
    """Return one pytest, with its own cache folder because several run side by side."""
    command = [PYTHON, "-m", "pytest", f"--postgres={major}", "-m", markers, *arguments]
    cache = f".pytest_cache/pg{major}-{part.replace(' ', '-')}"
    return Check(
        f"PostgreSQL {major}, {part}",
        [*command, "-o", f"cache_dir={cache}"],
        # The pytest arguments may select no test of this part.
        (0, NO_TESTS_SELECTED),
        is_pytest=True,
    )


def run_all(checks: list[Check]) -> int:
    """Run the checks side by side, print each result as it comes and a summary; return the exit code."""
    print(f"running {len(checks)} checks; the tests take some minutes", flush=True)
    started = time.monotonic()
    children = Children()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(max_workers=MAX_AT_ONCE) as executor:
        waiting = {executor.submit(children.run, check) for check in checks}
        try:
            while waiting:
                with contextlib.suppress(TimeoutError):
                    for future in as_completed(waiting, timeout=PROGRESS_INTERVAL_SECONDS):
                        waiting.discard(future)
                        outcomes.append(future.result())
                        report(outcomes[-1])
                if waiting:
                    print(f"{clock(time.monotonic() - started)} running: {children.progress()}", flush=True)
        except BaseException:
            children.stop()
            raise
    return summarize(outcomes, time.monotonic() - started)


def report(outcome: Outcome) -> None:
    """Print one line about a check, and its whole output if it failed."""
    if not outcome.passed:
        print(outcome.output.rstrip())
    print(line(outcome), flush=True)


def summarize(outcomes: list[Outcome], duration_seconds: float) -> int:
    """Print all results, slowest first, and return the exit code."""
    failed = [outcome for outcome in outcomes if not outcome.passed]
    print(f"\nsummary, {clock(duration_seconds)} in total:")
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.duration_seconds):
        print(f"  {line(outcome)}")
        for skipped in outcome.skipped:
            print(f"              skipped {skipped}")
    if all(outcome.empty for outcome in outcomes if outcome.check.is_pytest):
        print("no test was selected")
        return 1
    count = len(outcomes)
    print(f"{len(failed)} of {count} checks failed" if failed else f"all {count} checks passed")
    return 1 if failed else 0


def line(outcome: Outcome) -> str:
    """Return the result of a check in one line, with the counts of pytest."""
    word = "passed" if outcome.passed else "FAILED"
    text = f"{clock(outcome.duration_seconds)} {word} {outcome.check.name}"
    lines = outcome.output.strip().splitlines()
    if outcome.check.is_pytest and lines:
        text += f": {lines[-1].strip('= ')}"
    return text


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds."""
    return f"{seconds // 60:2.0f}:{seconds % 60:02.0f}"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
