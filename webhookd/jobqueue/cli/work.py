"""`webhookd jobs work`: an executor that does jobs by running a command for each."""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import click

from webhookd.cli.client import ANSWER_TIMEOUT_SECONDS, Answer, Client, asks_daemon, unexpected
from webhookd.cli.options import INTERRUPTED, example, executor_option, some_text
from webhookd.cli.text import escaped
from webhookd.core.errors import RequestRefused, ServiceUnavailable, WebhookdError
from webhookd.core.limits import MAX_LEASE_SECONDS
from webhookd.jobqueue.cli.command import Failure, RunningCommand, Success
from webhookd.jobqueue.cli.lease import Delays, Lease, Lost

# One question for a job, and one answer: below the minute after which proxies end a connection.
WAIT_SECONDS = 20.0
NOT_DONE = 1
DISABLED = "job_substrate_disabled"
# By these no process ends; Python does not either by SIGPIPE and SIGXFSZ. Then its own faults, and SIGKILL.
_LASTING = "CHLD CONT INFO STOP TSTP TTIN TTOU URG WINCH PIPE XFSZ"
_FATAL = "ABRT BUS EMT FPE ILL KILL SEGV SYS TRAP"
# All others, whoever sends them: they would end us, and leave our commands running unseen.
ENDING_SIGNALS = [
    order
    for order in signal.valid_signals()
    if getattr(order, "name", "").removeprefix("SIG") not in f"{_LASTING} {_FATAL}".split()
]
# Before it is asked again whether a command that was being started can be killed.
STARTING_SECONDS = 0.01


@dataclass(frozen=True)
class Asked:
    """What was asked for."""

    kind: str
    executor: str
    holder: str
    concurrency: int
    lease_seconds: float
    once: bool
    words: Sequence[str]


@click.command(
    "work",
    epilog=example(
        "webhookd jobs work --kind thumbnail.make -- ./make-thumbnail",
        "webhookd jobs work --kind report.send --executor Agent --concurrency 4 -- python3 send.py",
    ),
    context_settings={"allow_interspersed_args": False},
)
@click.option("--kind", type=some_text, metavar="KIND", required=True, help="Of which kind.")
@executor_option("For whom they are.")
@click.option(
    "--concurrency", type=click.IntRange(1, 100), default=1, show_default=True, help="So many at a time."
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(1, MAX_LEASE_SECONDS),
    default=60.0,
    show_default=True,
    help="How soon others get the job when this dies; renewed while the command runs.",
)
@click.option(
    "--holder", type=some_text, metavar="NAME", help="Who this is, for the record (default: host:pid)."
)
@click.option(
    "--once",
    is_flag=True,
    help="Wait for one job, do it, and end: 0 if it succeeded, 130 if interrupted before, else 1.",
)
@click.argument("words", metavar="-- COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
@asks_daemon
def work(
    client: Client,
    *,
    kind: str,
    executor: str,
    concurrency: int,
    lease_seconds: float,
    holder: str | None,
    once: bool,
    words: tuple[str, ...],
) -> None:
    """Take jobs, and run COMMAND for each, with the job as JSON on its stdin.

    Exit code 0 is success, with what it wrote into the file $WEBHOOKD_RESULT_FILE as its result_ref: one line
    of at most 2000 characters in UTF-8, else the job has failed for good. Exit code 65 is a failure for good;
    any other is tried again later. The last of its stderr is the error's message. It also has
    $WEBHOOKD_JOB_ID, $WEBHOOKD_JOB_KIND and $WEBHOOKD_JOB_ATTEMPT.

    While it runs the lease is renewed. If the lease is lost, or the job's deadline passes, it is killed with
    all that it started. A job may be done twice: when this is killed by SIGKILL its command goes on, and when
    its lease has run out others begin anew.

    SIGTERM or Ctrl-C takes no more jobs and lets those under way end; a second one asks them to end and then
    kills them, which costs each an attempt (WORKER_STOPPED); a third kills them at once, without a report. A
    daemon that is away is waited for.
    """
    if once and concurrency > 1:
        raise click.UsageError("--once: one job has no --concurrency")
    if shutil.which(words[0]) is None:
        raise click.UsageError(f"{escaped(words[0])} is no command that can be run")
    name = holder or f"{socket.gethostname()}:{os.getpid()}"
    asked = Asked(kind, executor, name, concurrency, lease_seconds, once, words)
    sys.exit(asyncio.run(Worker(client, asked).run()))


class Worker:
    """Does jobs until it is told to stop."""

    def __init__(self, client: Client, asked: Asked) -> None:
        self._client = client
        self._asked = asked
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._commands: set[RunningCommand] = set()
        self._is_away = False
        self._interrupted = False
        self._began = False
        self._succeeded = True
        self._failed = False

    async def run(self) -> int:
        """Its exit code."""
        loop = asyncio.get_running_loop()
        for order in ENDING_SIGNALS:
            loop.add_signal_handler(order, self._stop)
        places = [self._place() for _ in range(self._asked.concurrency)]
        ended = await asyncio.gather(*places, return_exceptions=True)
        for error in filter(None, ended):
            raise error
        if self._killing.is_set():
            return INTERRUPTED
        if self._failed or (self._asked.once and not self._succeeded):
            return NOT_DONE
        # Who asked for one job and got none must not take it for done.
        return INTERRUPTED if self._interrupted and self._asked.once and not self._began else 0

    def _stop(self) -> None:
        if self._killing.is_set():
            self._leave()
            return
        if self._interrupted:
            self._killing.set()
            self._tell_of_commands("stopping 1 command", "stopping {} commands")
        else:
            self._tell_of_commands(
                "waiting for 1 job to end; once more stops it",
                "waiting for {} jobs to end; once more stops them",
            )
        self._interrupted = True
        self._stopping.set()

    def _leave(self) -> None:
        """At once, and no command stays."""
        starting = [command for command in self._commands if not command.cut_off()]
        if not starting:
            os._exit(INTERRUPTED)
        asyncio.get_running_loop().call_later(STARTING_SECONDS, self._leave)

    async def _place(self) -> None:
        """Do jobs, one after the other. What goes wrong here, others may finish what they have begun."""
        try:
            await self._work()
        except WebhookdError as error:
            if not self._failed:  # the others may be told the same
                self._tell(str(error))
            self._failed = True
        finally:
            self._stopping.set()

    async def _work(self) -> None:
        delays = Delays()
        while not self._stopping.is_set():
            try:
                claimed = await self._claim_unless_stopping()
            except (ServiceUnavailable, RequestRefused) as error:
                await self._no_answer(error, delays)
                continue
            if claimed is None:
                return
            self._answered()
            delays = Delays()
            if not claimed.body:
                continue
            lease = self._lease(claimed)
            self._began = True
            try:
                await self._do(lease)
            except Lost as error:
                self._succeeded = False
                self._say(lease, f"lost: {error}")
            if self._asked.once:
                return

    def _lease(self, claimed: Answer) -> Lease:
        try:
            return Lease(self._ask, claimed, self._asked.lease_seconds)
        except (KeyError, TypeError, ValueError) as error:
            raise unexpected(self._client, error) from error

    async def _no_answer(self, error: ServiceUnavailable | RequestRefused, delays: Delays) -> None:
        """Away, or switched off: it may be back. What else it refuses, it will refuse again."""
        if self._stopping.is_set():
            return
        if isinstance(error, RequestRefused) and error.code != DISABLED:
            raise error
        if not self._is_away:
            self._is_away = True
            self._tell(f"{error}; waiting for it")
        await _first(self._stopping.wait(), asyncio.sleep(delays.next_seconds()))

    def _answered(self) -> None:
        if self._is_away:
            self._is_away = False
            self._tell("jobs are taken again")

    async def _do(self, lease: Lease) -> None:
        await lease.renew()
        environment = {
            "WEBHOOKD_JOB_ID": lease.job_id,
            "WEBHOOKD_JOB_KIND": lease.kind,
            "WEBHOOKD_JOB_ATTEMPT": str(lease.attempt),
        }
        try:
            command = RunningCommand(self._asked.words, lease.body, environment)
            self._commands.add(command)
            try:
                async with command:
                    ended = await self._watched(lease, command)
            finally:
                self._commands.discard(command)
        except OSError as error:  # gone since we looked, or no memory or place for it
            ended = Failure("COMMAND_NOT_STARTED", str(error))
        if isinstance(ended, Success):
            await lease.report("succeed", self._killing.is_set, result_ref=ended.result_ref)
            self._say(lease, "succeeded")
            return
        self._succeeded = False
        await lease.report("fail", self._killing.is_set, **ended._asdict())
        self._say(lease, f"failed{' for good' if ended.permanent else ''}: {ended.error_code}")

    async def _watched(self, lease: Lease, command: RunningCommand) -> Success | Failure:
        """How it ended: by itself, or because it had to."""
        ending = asyncio.ensure_future(command.ended())
        keeping = asyncio.ensure_future(lease.keep())
        killing = asyncio.ensure_future(self._killing.wait())
        late = asyncio.ensure_future(lease.deadline()) if lease.has_deadline else killing
        watching = {ending, keeping, killing, late}
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ending.result()
            await command.kill()
            if keeping.done():
                keeping.result()  # raises Lost
            if killing.done():
                return Failure("WORKER_STOPPED", "the worker was told to stop at once")
            return Failure("DEADLINE_PASSED", "its deadline passed while it ran")
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
        # Not a long one after a silence: that it is over should be said when it is.
        wait_seconds = 0.0 if self._is_away else WAIT_SECONDS
        body = {
            "kind": self._asked.kind,
            "executor": self._asked.executor,
            "lease_holder": self._asked.holder,
            "lease_seconds": self._asked.lease_seconds,
            "wait_seconds": wait_seconds,
        }
        timeout_seconds = wait_seconds + ANSWER_TIMEOUT_SECONDS
        return await self._client.request("POST", "/v1/jobs/claim", body, timeout_seconds)

    async def _ask(self, path: str, body: Mapping[str, object]) -> Answer:
        return await self._client.request("POST", path, body)

    def _say(self, lease: Lease, what: str) -> None:
        self._tell(f"job {lease.job_id}, attempt {lease.attempt}: {what}")

    def _tell_of_commands(self, one: str, several: str) -> None:
        if self._commands:
            self._tell(one if len(self._commands) == 1 else several.format(len(self._commands)))

    def _tell(self, what: str) -> None:
        with suppress(OSError):  # nobody reads it any more; the work goes on
            click.echo(f"webhookd: {what}", err=True)


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
