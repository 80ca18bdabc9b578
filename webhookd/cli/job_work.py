"""`webhookd jobs work`: an executor that does jobs by running a command for each."""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import click

from webhookd.cli.answers import Answer
from webhookd.cli.client import ANSWER_TIMEOUT_SECONDS, Client, asks_daemon
from webhookd.cli.job_command import Failure, RunningCommand, Success
from webhookd.cli.job_lease import Delays, Lease, Lost
from webhookd.cli.options import example, executor_option
from webhookd.cli.text import escaped
from webhookd.model.errors import RequestRefused, ServiceUnavailable, WebhookdError

# One question for a job, and one answer: below the minute after which proxies end a connection.
WAIT_SECONDS = 20.0
NOT_DONE = 1
INTERRUPTED = 130
DISABLED = "job_substrate_disabled"


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
@click.option("--kind", required=True, help="Of which kind.")
@executor_option("For whom they are.")
@click.option(
    "--concurrency", type=click.IntRange(1, 100), default=1, show_default=True, help="So many at a time."
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(1, 86_400),
    default=60.0,
    show_default=True,
    help="How soon others get the job when this dies; renewed while the command runs.",
)
@click.option("--holder", metavar="NAME", help="Who this is, for the record (default: host:pid).")
@click.option("--once", is_flag=True, help="Wait for one job, do it, and end: 0 if it succeeded, else 1.")
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

    Exit code 0 is success, with what it wrote into the file $WEBHOOKD_RESULT_FILE as its result_ref. Exit
    code 65 is a failure for good; any other is tried again later. The last of its stderr is the error's
    message. It also has $WEBHOOKD_JOB_ID, $WEBHOOKD_JOB_KIND and $WEBHOOKD_JOB_ATTEMPT.

    While it runs the lease is renewed. If the lease is lost, or the job's deadline passes, it is killed with
    all that it started. A job may be done twice: when this is killed, others begin it anew.

    SIGTERM or Ctrl-C takes no more jobs and lets those under way end; a second one kills them. A daemon that
    is away is waited for.
    """
    if once and concurrency > 1:
        raise click.UsageError("--once: one job has no --concurrency")
    if shutil.which(words[0]) is None:
        raise click.UsageError(f"{escaped(words[0])} is no command that can be run")
    name = holder or f"{socket.gethostname()}:{os.getpid()}"
    asked = Asked(kind, executor, name, concurrency, lease_seconds, once, words)
    worker = Worker(client, asked)
    exit_code = asyncio.run(worker.run())
    if worker.refused is not None:
        raise worker.refused
    sys.exit(exit_code)


class Worker:
    """Does jobs until it is told to stop."""

    def __init__(self, client: Client, asked: Asked) -> None:
        self._client = client
        self._asked = asked
        # A question for a job, or a renewal and a report, of each place.
        self._threads = ThreadPoolExecutor(2 * asked.concurrency)
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._is_away = False
        self._succeeded = True
        self.refused: WebhookdError | None = None

    async def run(self) -> int:
        """Its exit code."""
        loop = asyncio.get_running_loop()
        for order in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(order, self._stop)
        with self._threads:
            await asyncio.gather(*(self._work() for _ in range(self._asked.concurrency)))
        if self._killing.is_set():
            return INTERRUPTED
        return 0 if self._succeeded or not self._asked.once else NOT_DONE

    def _stop(self) -> None:
        if self._killing.is_set():
            os._exit(INTERRUPTED)
        if self._stopping.is_set():
            self._killing.set()
        self._stopping.set()
        # Who waits for a job is told that none is wanted, and the daemon gives none to who is gone.
        self._client.abandon()

    async def _work(self) -> None:
        """One place."""
        delays = Delays()
        while not self._stopping.is_set():
            try:
                claimed = await self._in_thread(self._claim)
            except (ServiceUnavailable, RequestRefused) as error:
                await self._no_answer(error, delays)
                continue
            self._answered()
            delays = Delays()
            if not claimed.body:
                continue
            lease = Lease(self._ask, claimed, self._asked.lease_seconds)
            try:
                await self._do(lease)
            except Lost as error:
                self._succeeded = False
                self._say(lease, f"lost: {error}")
            if self._asked.once:
                return

    async def _no_answer(self, error: ServiceUnavailable | RequestRefused, delays: Delays) -> None:
        """Away, or switched off: it may be back. What else it refuses, it will refuse again."""
        if self._stopping.is_set():
            return
        if isinstance(error, RequestRefused) and error.code != DISABLED:
            self.refused = error
            self._stop()
            return
        if not self._is_away:
            self._is_away = True
            click.echo(f"webhookd: {error}; waiting for it", err=True)
        await _first(self._stopping.wait(), asyncio.sleep(delays.next_seconds()))

    def _answered(self) -> None:
        if self._is_away:
            self._is_away = False
            click.echo("webhookd: the daemon answers again", err=True)

    async def _do(self, lease: Lease) -> None:
        await lease.renew()
        environment = {
            "WEBHOOKD_JOB_ID": lease.job_id,
            "WEBHOOKD_JOB_KIND": lease.kind,
            "WEBHOOKD_JOB_ATTEMPT": str(lease.attempt),
        }
        try:
            async with RunningCommand(self._asked.words, lease.body, environment) as command:
                ended = await self._watched(lease, command)
        except OSError as error:  # gone since we looked, or no memory for it
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

    def _claim(self) -> Answer:
        # Not a long one after a silence: that it is over should be said when it is.
        wait_seconds = 0.0 if self._is_away else WAIT_SECONDS
        body = {
            "kind": self._asked.kind,
            "executor": self._asked.executor,
            "lease_holder": self._asked.holder,
            "lease_seconds": self._asked.lease_seconds,
            "wait_seconds": wait_seconds,
        }
        return self._client.wait("/v1/jobs/claim", body, wait_seconds + ANSWER_TIMEOUT_SECONDS)

    async def _ask(self, path: str, body: Mapping[str, object]) -> Answer:
        return await self._in_thread(lambda: self._client.post(path, body))

    async def _in_thread(self, call: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _say(self, lease: Lease, what: str) -> None:
        click.echo(f"webhookd: job {lease.job_id}, attempt {lease.attempt}: {what}", err=True)


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
