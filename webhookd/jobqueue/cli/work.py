"""`webhookd jobs work`: an executor that runs a command for each job."""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click

from webhookd.cli.client import ANSWER_TIMEOUT_SECONDS, Answer, Client, asks_daemon, unexpected
from webhookd.cli.options import INTERRUPTED, escaped, example, some_text
from webhookd.core.errors import RequestRefused, ServiceUnavailable, WebhookdError
from webhookd.core.limits import MAX_LEASE_SECONDS
from webhookd.jobqueue.cli.execution import (
    CommandFailure,
    CommandSuccess,
    JobLease,
    LeaseLost,
    RunningCommand,
    growing_delays,
)
from webhookd.jobqueue.cli.operate import executor_option

# How long a claim waits; below the minute after which proxies end a connection.
WAIT_SECONDS = 20.0
FAILED = 1
DISABLED = "job_substrate_disabled"
# Signals that do not end a process; Python ignores SIGPIPE and SIGXFSZ.
_HARMLESS = "CHLD CONT INFO STOP TSTP TTIN TTOU URG WINCH PIPE XFSZ"
# Crashes, and SIGKILL: they cannot be handled here.
_FATAL = "ABRT BUS EMT FPE ILL KILL SEGV SYS TRAP"
# All other signals would end this process and leave its commands running.
ENDING_SIGNALS = [
    number
    for number in signal.valid_signals()
    if getattr(number, "name", "").removeprefix("SIG") not in f"{_HARMLESS} {_FATAL}".split()
]
# Between two attempts to kill a command that is still being started.
STARTING_SECONDS = 0.01


@dataclass(frozen=True)
class WorkOptions:
    """The options of `jobs work`."""

    kind: str
    executor: str
    holder: str
    concurrency: int
    lease_seconds: float
    once: bool
    command: Sequence[str]


@click.command(
    "work",
    epilog=example(
        "webhookd jobs work --kind thumbnail.make -- ./make-thumbnail",
        "webhookd jobs work --kind report.send --executor Agent --concurrency 4 -- python3 send.py",
    ),
    context_settings={"allow_interspersed_args": False},
)
@click.option("--kind", type=some_text, metavar="KIND", required=True, help="Job kind to claim.")
@executor_option("Executor to claim jobs for.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Number of commands to run in parallel.",
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(1, MAX_LEASE_SECONDS),
    default=60.0,
    show_default=True,
    help="Length of the lease, renewed while the command runs. If the worker dies, another one gets the job "
    "when the lease ends.",
)
@click.option(
    "--holder", type=some_text, metavar="NAME", help="Name of this worker in the ledger (default: host:pid)."
)
@click.option(
    "--once",
    is_flag=True,
    help="Wait for one job, run it and exit: 0 if it succeeded, 130 if interrupted before, otherwise 1.",
)
@click.argument(
    "command", metavar="-- COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED
)
@asks_daemon
def work(client: Client, *, holder: str | None, **given: Any) -> None:
    """Claim jobs and run COMMAND for each, with the job as JSON on its stdin.

    Exit code 0 means success. The command may write a result_ref into the file $WEBHOOKD_RESULT_FILE: one
    line of at most 2000 characters in UTF-8; anything else is a permanent failure. Exit code 65 is a
    permanent failure; every other exit code is retried later. The end of stderr becomes the error message.
    The command also gets $WEBHOOKD_JOB_ID, $WEBHOOKD_JOB_KIND and $WEBHOOKD_JOB_ATTEMPT.

    The lease is renewed while the command runs. If the lease is lost, or the job's deadline passes, the
    command is killed with all its children. A job can run twice: after a SIGKILL of this worker its command
    continues, and another worker starts the job again when the lease has ended.

    The first SIGTERM or Ctrl-C stops claiming and waits for running commands. The second stops them, which
    costs each job an attempt (WORKER_STOPPED). The third kills them at once, without a report. If the daemon
    is unavailable, the worker waits for it.
    """
    options = WorkOptions(holder=holder or f"{socket.gethostname()}:{os.getpid()}", **given)
    if options.once and options.concurrency > 1:
        raise click.UsageError("--once cannot be combined with --concurrency")
    if shutil.which(options.command[0]) is None:
        raise click.UsageError(f"command not found: {escaped(options.command[0])}")
    sys.exit(asyncio.run(CommandWorker(client, options).run()))


class CommandWorker:
    """Runs jobs until a signal stops it."""

    def __init__(self, client: Client, options: WorkOptions) -> None:
        self._client = client
        self._options = options
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._commands: set[RunningCommand] = set()
        self._is_waiting_for_daemon = False
        self._interrupted = False
        self._started_job = False
        self._succeeded = True
        self._failed = False

    async def run(self) -> int:
        """Run the slots; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in ENDING_SIGNALS:
            loop.add_signal_handler(number, self._stop)
        slots = [self._slot() for _ in range(self._options.concurrency)]
        ended = await asyncio.gather(*slots, return_exceptions=True)
        for error in filter(None, ended):
            raise error
        if self._killing.is_set():
            return INTERRUPTED
        if self._failed or (self._options.once and not self._succeeded):
            return FAILED
        # --once without a job must not look like a job that succeeded.
        return INTERRUPTED if self._interrupted and self._options.once and not self._started_job else 0

    def _stop(self) -> None:
        if self._killing.is_set():
            self._kill_and_exit()
            return
        if self._interrupted:
            self._killing.set()
            self._say_if_running("stopping 1 command", "stopping {} commands")
        else:
            self._say_if_running(
                "waiting for 1 job to finish; signal again to stop it",
                "waiting for {} jobs to finish; signal again to stop them",
            )
        self._interrupted = True
        self._stopping.set()

    def _kill_and_exit(self) -> None:
        """Kill all commands and exit without reports."""
        starting = [command for command in self._commands if not command.kill_now()]
        if not starting:
            os._exit(INTERRUPTED)
        asyncio.get_running_loop().call_later(STARTING_SECONDS, self._kill_and_exit)

    async def _slot(self) -> None:
        """Run jobs one after the other. After an error the other slots may finish their jobs."""
        try:
            await self._work()
        except WebhookdError as error:
            if not self._failed:  # other slots may fail with the same error
                self._say(str(error))
            self._failed = True
        finally:
            self._stopping.set()

    async def _work(self) -> None:
        delays = growing_delays()
        while not self._stopping.is_set():
            try:
                claimed = await self._claim_unless_stopping()
            except (ServiceUnavailable, RequestRefused) as error:
                await self._wait_for_daemon(error, delays)
                continue
            if claimed is None:
                return
            if self._is_waiting_for_daemon:
                self._is_waiting_for_daemon = False
                self._say("claiming jobs again")
            delays = growing_delays()
            if not claimed.body:
                continue
            lease = self._lease(claimed)
            self._started_job = True
            try:
                await self._run_job(lease)
            except LeaseLost as error:
                self._succeeded = False
                self._say_of_job(lease, f"lost: {error}")
            if self._options.once:
                return

    def _lease(self, claimed: Answer) -> JobLease:
        try:
            return JobLease(self._client, claimed, self._options.lease_seconds)
        except (KeyError, TypeError, ValueError) as error:
            raise unexpected(self._client, error) from error

    async def _wait_for_daemon(
        self, error: ServiceUnavailable | RequestRefused, delays: Iterator[float]
    ) -> None:
        """Wait if the daemon is unavailable or the queue disabled; other refusals are permanent."""
        if self._stopping.is_set():
            return
        if isinstance(error, RequestRefused) and error.code != DISABLED:
            raise error
        if not self._is_waiting_for_daemon:
            self._is_waiting_for_daemon = True
            self._say(f"{error}; waiting")
        with suppress(TimeoutError):
            async with asyncio.timeout(next(delays)):
                await self._stopping.wait()

    async def _run_job(self, lease: JobLease) -> None:
        await lease.renew()
        environment = {
            "WEBHOOKD_JOB_ID": lease.job_id,
            "WEBHOOKD_JOB_KIND": lease.kind,
            "WEBHOOKD_JOB_ATTEMPT": str(lease.attempt),
        }
        try:
            command = RunningCommand(self._options.command, lease.body, environment)
            self._commands.add(command)
            try:
                async with command:
                    ended = await self._watch(lease, command)
            finally:
                self._commands.discard(command)
        except OSError as error:  # the program is gone, or there is no memory or disk space
            ended = CommandFailure("COMMAND_NOT_STARTED", str(error))
        if isinstance(ended, CommandSuccess):
            await lease.report("succeed", self._killing.is_set, result_ref=ended.result_ref)
            self._say_of_job(lease, "succeeded")
            return
        self._succeeded = False
        await lease.report("fail", self._killing.is_set, **ended._asdict())
        self._say_of_job(lease, f"failed{' permanently' if ended.permanent else ''}: {ended.error_code}")

    async def _watch(self, lease: JobLease, command: RunningCommand) -> CommandSuccess | CommandFailure:
        """Wait for the end of the command, and kill it at a lost lease, a deadline or a second signal."""
        ending = asyncio.ensure_future(command.wait())
        keeping = asyncio.ensure_future(lease.keep())
        killing = asyncio.ensure_future(self._killing.wait())
        late = asyncio.ensure_future(lease.wait_for_deadline())
        watching = {ending, keeping, killing, late}
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ending.result()
            await command.kill()
            if keeping.done():
                keeping.result()  # raises LeaseLost
            if killing.done():
                return CommandFailure("WORKER_STOPPED", "the worker was stopped")
            return CommandFailure("DEADLINE_PASSED", "the deadline passed while the command ran")
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _claim_unless_stopping(self) -> Answer | None:
        """Claim a job. When the worker stops, close the connection: the daemon then assigns no job to it."""
        claiming = asyncio.create_task(self._claim())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([claiming, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not claiming.done():
            claiming.cancel()
            await asyncio.wait([claiming])
            return None
        return claiming.result()

    async def _claim(self) -> Answer:
        # No long wait after an outage, so that its end is noticed and reported at once.
        wait_seconds = 0.0 if self._is_waiting_for_daemon else WAIT_SECONDS
        body = {
            "kind": self._options.kind,
            "executor": self._options.executor,
            "lease_holder": self._options.holder,
            "lease_seconds": self._options.lease_seconds,
            "wait_seconds": wait_seconds,
        }
        timeout_seconds = wait_seconds + ANSWER_TIMEOUT_SECONDS
        return await self._client.request("POST", "/v1/jobs/claim", body, timeout_seconds)

    def _say_of_job(self, lease: JobLease, text: str) -> None:
        self._say(f"job {lease.job_id}, attempt {lease.attempt}: {text}")

    def _say_if_running(self, one: str, several: str) -> None:
        if self._commands:
            self._say(one if len(self._commands) == 1 else several.format(len(self._commands)))

    def _say(self, text: str) -> None:
        with suppress(OSError):  # stderr is closed; continue
            click.echo(f"webhookd: {text}", err=True)
