"""`webhookd jobs`: the commands for jobs and operators, and `work`, which runs a command for each job."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self
from uuid import uuid4

import pytest
from aiohttp import web

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.flow import Flow
from tests.support.shell import Shell
from tests.support.waiting import until, until_true

KIND = "thumbnail.make"
STATUS = "select status = $2 from webhookd.job_queue where job_id = $1::text::uuid"
# Inserted without triggers.
WAITING = """
    insert into webhookd.job_queue (
        job_kind, event_domain, idempotency_key, executor, enqueued_by, source_system)
    select $1, 'general', i::text, 'DOT', 'past', 'past' from generate_series(1, $2::int) i"""
RENEWALS = """
    select count(*) from webhookd.job_command_run
    where job_id = $1::text::uuid and command = 'fn_job_progress' and from_status = to_status"""
LEASED_UNTIL = "select leased_until from webhookd.job_queue where job_id = $1::text::uuid"
EXPIRE = "update webhookd.job_queue set leased_until = now() - interval '1 s' where job_id = $1::text::uuid"
WORK = ("jobs", "work", "--kind", KIND)
UNKNOWN_ID = "0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262"
# The first run writes its pid and stays, with a child; every later run succeeds at once.
STAYS_ONCE = "if [ -e began ]; then exit 0; fi; sleep 600 & echo $$ > began.new; mv began.new began; wait"
WHILE_GO = "while [ -e go ]; do sleep 0.1; done"


@pytest.fixture
async def api(make_api: MakeApi) -> Client:
    """An instance with the job queue enabled and immediate retries."""
    api = await make_api(services={"enabled": ["api", "jobs"]}, jobs={"base_delay_seconds": 0.0})
    await api.daemon.until(lambda: api.daemon.logged("[jobs] was written to the database"), "written")
    assert (await api.patch("/v1/job-substrate", {"enabled": True})).status == 200
    return api


@contextlib.contextmanager
def working(cli: Shell, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker during the block."""
    with cli.start(*WORK, *words) as worker:
        try:
            yield worker
        finally:
            worker.kill()


@contextlib.asynccontextmanager
async def command_started(api: Client, folder: Path) -> AsyncIterator[int]:
    """The process group of STAYS_ONCE once it runs; killed after the block."""
    file = folder / "began"
    await api.daemon.until(lambda: file.exists() and file.read_text(), "started")
    group = int(file.read_text())
    try:
        yield group
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def is_gone(group: int) -> bool:
    """True if no process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


async def enqueue(cli: Shell, *options: str) -> str:
    """Enqueue a job; returns the printed line."""
    return (await cli.done("jobs", "enqueue", KIND, *options)).out.strip()


async def test_commands_for_jobs_and_operators(cli: Shell) -> None:
    """Each command works and prints text or JSON; a refusal is one line."""
    assert (await cli.done("jobs", "disable")).out == "job queue disabled\n"
    refused = await cli.run("jobs", "enqueue", KIND)
    assert (refused.exit_code, "webhookd jobs enable" in refused.error) == (1, True)
    assert (await cli.done("jobs", "enable", "--json")).documents[0]["enabled"] is True
    options = (
        "--key",
        "7",
        "--safe-payload",
        '{"width": 200}',
        "--payload-ref",
        "s3://7",
        "--deadline",
        "2h",
    )
    job = await enqueue(cli, *options)
    assert await enqueue(cli, *options[:-2]) == f"{job} duplicate queued"
    assert await enqueue(cli, "--idempotency-key", *options[1:-2]) == f"{job} duplicate queued"
    later = await enqueue(cli, "--after", "7d")
    listed = await cli.done("jobs", "list", "--kind", KIND, "--status", "queued", "--json")
    assert [row["job_id"] for row in listed.documents] == [later, job]
    assert [row[0] for row in (await cli.done("jobs", "list")).rows[1:]] == [later, job]
    shown = (await cli.done("jobs", "show", job)).out
    assert all(word in shown for word in (KIND, "external_worker", "s3://7", "width", "deadline", "enqueue"))
    assert (await cli.done("jobs", "cancel", later, "--reason", "no")).out == f"job {later}: cancelled\n"
    assert (await cli.run("jobs", "requeue", job)).error.endswith("(not_dead_letter)")
    registered = await cli.done("jobs", "register", "order.created", KIND, "--executor", "Agent")
    assert registered.out == f"order.created events create {KIND} jobs for Agent\n"
    off = await cli.done("jobs", "register", "order.created", KIND, "--off")
    assert off.out == f"order.created events no longer create {KIND} jobs for Agent\n"
    again = await cli.done("jobs", "register", "order.created", KIND, "--executor", "DOT", "--priority", "5")
    assert again.out == f"order.created events create {KIND} jobs for DOT, priority 5\n"
    off = await cli.run("jobs", "register", "order.craeted", KIND, "--off")
    assert (off.exit_code, "there is no registration" in off.error) == (1, True)
    await cli.done("jobs", "configure", "--max-attempts", "3", "--jitter", "0.5")
    await cli.done("jobs", "configure", "--kind", "other", "--retention-seconds", "90")
    configured = await cli.done("jobs", "configure", "--kind", KIND, "--max-attempts", "2")
    assert "3 attempts, delays of 0s" in configured.out
    assert ["other", "retention", "seconds", "90"] in configured.rows
    assert [KIND, "max", "attempts", "2"] in configured.rows
    await cli.done("jobs", "configure", "--kind", "other", "--retention-seconds", "default")
    shown = (await cli.done("jobs", "status", "--json")).documents[0]
    assert (shown["policy"]["jitter"], shown["kind_policies"][1]["max_attempts"]) == (0.5, 2)
    back = await cli.done("jobs", "configure", "--kind", KIND, "--max-attempts", "default", "--json")
    assert [kind["max_attempts"] for kind in back.documents[0]["kind_policies"]] == [None, None]
    status = (await cli.done("jobs", "status")).out
    assert "order.created" in status
    assert "order.craeted" not in status
    assert "Kinds with their own policy" not in status
    decided = [line.split()[1:3] for line in status.partition("Last changes")[2].splitlines()[2:]]
    assert decided[:6] == [["api", "configure"]] * 5 + [["api", "register_event"]]
    for words in (("show", "7"), ("configure",), ("work", "--kind", KIND, "--", "no-such-command")):
        assert (await cli.run("jobs", *words)).exit_code == 2, words
    assert (await cli.run("jobs", "show", str(uuid4()))).exit_code == 1


async def test_bounded_counts_are_marked(flow: Flow, make_api: MakeApi, lonely: Shell) -> None:
    """With more jobs than are counted, page and status show "or more"; JSON has the bound."""
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(WAITING, KIND, 10_001)
    await flow.daemon.execute("select webhookd.fn_job_enable(true, 'test')")
    api = await make_api(services={"enabled": ["api"]})
    await api.daemon.until(lambda: api.daemon.metric("webhookd_job_queue_backlog") == 10_000, "seen")
    seen = api.daemon.get_json("/status")["job_queue"]
    assert (seen["backlog"], seen["in_progress"], seen["counted_up_to"]) == (10_000, 0, 10_000)
    assert b"10,000+ queued, 0 in progress" in api.daemon.get("/")[1]
    cli = lonely.having(WEBHOOKD_URL=f"http://127.0.0.1:{api.daemon.port}")
    assert "10,000 or more queued, 0 in progress" in (await cli.done("status")).out
    status = (await cli.done("jobs", "status")).rows
    assert ["queued", "10,000", "or", "more,"] in [row[:4] for row in status]
    assert ["scheduled", "for", "later", "0"] in status
    queue = (await cli.done("jobs", "status", "--json")).documents[0]["queue"]
    assert (queue["backlog"], queue["counted_up_to"]) == (10_000, 10_000)


async def test_work_runs_a_command_per_job(api: Client, cli: Shell, flow: Flow) -> None:
    """The job on stdin, exit codes 0, 65 and others, stderr, the result file, and --once."""
    job = await enqueue(cli, "--safe-payload", '{"n": 1e400}')
    script = 'cat > seen.json; printf "s3://done/$WEBHOOKD_JOB_ATTEMPT" > "$WEBHOOKD_RESULT_FILE"; echo out'
    ran = await cli.done(*WORK, "--once", "--", "sh", "-c", script)
    assert ran.out == "out\n"
    assert ran.err == f"webhookd: job {job}, attempt 1: succeeded\n"
    assert job in (cli.folder / "seen.json").read_text()
    shown = (await api.get(f"/v1/jobs/{job}")).body
    assert (shown["status"], shown["result_ref"]) == ("succeeded", "s3://done/1")
    assert [run["to_status"] for run in shown["runs"]] == ["queued", "leased", "in_progress", "succeeded"]

    failing = await enqueue(cli)
    # A child that it leaves running keeps stderr open and blocks nothing.
    script = (
        'sleep 600 & echo $! >> left; echo "attempt $WEBHOOKD_JOB_ATTEMPT: no" >&2; '
        "[ $WEBHOOKD_JOB_ATTEMPT = 1 ] && exit 3; exit 65"
    )
    with working(cli, "--", "sh", "-c", script) as worker:
        await until(flow.daemon, STATUS, failing, "dead_letter")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
        for left in (cli.folder / "left").read_text().split():
            os.kill(int(left), signal.SIGKILL)
        _, output = worker.communicate()
    assert output.decode().splitlines() == [
        "attempt 1: no",
        f"webhookd: job {failing}, attempt 1: failed: EXIT_3",
        "attempt 2: no",
        f"webhookd: job {failing}, attempt 2: failed permanently: EXIT_65",
    ]
    shown = (await api.get(f"/v1/jobs/{failing}")).body
    assert (shown["last_error_code"], shown["last_error"]) == ("EXIT_65", "attempt 2: no")
    requeued = await cli.done("jobs", "requeue", failing)
    assert requeued.out.startswith(f"job {failing}: requeued as job ")
    child = requeued.out.split()[-1]
    rows = (await cli.done("jobs", "show", failing)).rows
    assert [row[3:] for row in rows if row[2:3] == ["failed:"]] == [
        ["EXIT_3", "1", "api"],
        ["EXIT_65", "2", "api"],
    ]
    assert ["requeued", "as", child] in rows
    assert ["priority", "0"] in rows
    assert not any("requeued" in row for row in (await cli.done("jobs", "show", child)).rows)
    # Also on a terminal of 80 columns.
    with cli.on_terminal("jobs", "show", failing) as screen:
        await screen.shows("failed: EXIT_3")
    assert (
        f"the job was already requeued as job {child} (" in (await cli.run("jobs", "requeue", failing)).error
    )
    bad = await cli.run(*WORK, "--once", "--", "sh", "-c", 'seq 9 > "$WEBHOOKD_RESULT_FILE"')
    assert bad.exit_code == 1
    assert "failed permanently: RESULT_REF_INVALID" in bad.err


async def test_failure_without_a_message(api: Client, cli: Shell) -> None:
    """Only the code is shown; singular and plural are right; the status names the waiting work."""
    await cli.done("jobs", "configure", "--kind", KIND, "--max-attempts", "1")
    job = await enqueue(cli)
    assert (await cli.run(*WORK, "--once", "--", "false")).exit_code == 1
    rows = (await cli.done("jobs", "show", job)).rows
    assert ["error", "EXIT_1"] in rows
    assert ["attempts", "1", "of", "1"] in rows
    assert not any("expired" in row for row in rows)
    await api.daemon.until(lambda: api.daemon.metric("webhookd_job_queue_dead_letter_open") == 1, "seen")
    status = (await cli.done("status")).out
    assert "0 in progress, 1 dead letter: webhookd jobs list --status dead_letter" in status
    assert "Waiting to be delivered" in status


async def test_lease_is_renewed_while_the_command_runs(api: Client, cli: Shell, flow: Flow) -> None:
    """A command can run longer than its lease, and no other worker gets the job."""
    job = await enqueue(cli)
    (cli.folder / "go").touch()
    # A shorter lease could expire on a busy machine.
    with working(cli, "--once", "--lease-seconds", "5", "--", "sh", "-c", WHILE_GO) as worker:
        await until(flow.daemon, STATUS, job, "in_progress")
        first_end = await flow.daemon.fetchval(LEASED_UNTIL, job)
        await until(flow.daemon, "select clock_timestamp() > $1", first_end)
        (cli.folder / "go").unlink()
        _, output = await asyncio.to_thread(worker.communicate)
    assert (worker.returncode, output.decode()) == (0, f"webhookd: job {job}, attempt 1: succeeded\n")
    shown = (await api.get(f"/v1/jobs/{job}")).body
    assert (shown["status"], shown["attempts"], shown["lease_recoveries"]) == ("succeeded", 1, 0)
    # Fewer renewals would not have kept the lease.
    assert await flow.daemon.fetchval(RENEWALS, job) >= 2


async def test_another_worker_takes_over_after_sigkill(api: Client, cli: Shell, flow: Flow) -> None:
    """The lease expires, is recovered, and another worker runs the job."""
    job = await enqueue(cli)
    with working(cli, "--holder", "first", "--", "sh", "-c", STAYS_ONCE) as first:
        async with command_started(api, cli.folder):
            first.kill()
            await flow.superuser.execute(EXPIRE, job)
            second = await cli.done(*WORK, "--once", "--holder", "second", "--", "sh", "-c", STAYS_ONCE)
    assert "succeeded" in second.err
    shown = (await api.get(f"/v1/jobs/{job}")).body
    assert (shown["status"], shown["lease_holder"], shown["lease_recoveries"]) == ("succeeded", "second", 1)
    rows = (await cli.done("jobs", "show", job)).rows
    assert ["expired", "leases", "1", "in", "the", "last", "attempt"] in rows
    assert ["attempts", "1", "of", "5"] in rows
    assert await flow.daemon.fetchval(
        "select count(*) = 1 from webhookd.events where event_type = 'dot.job.lease_recovered'"
    )


async def test_lost_lease_kills_the_command(api: Client, cli: Shell, flow: Flow) -> None:
    """The command and its children are killed at the next renewal; the worker continues with the next job."""
    job = await enqueue(cli)
    with working(cli, "--lease-seconds", "6", "--", "sh", "-c", STAYS_ONCE) as worker:
        async with command_started(api, cli.folder) as group:
            # In one transaction: a renewal in between would keep the lease.
            async with flow.superuser.transaction():
                await flow.superuser.execute(EXPIRE, job)
                await flow.superuser.execute("select webhookd.fn_job_lease_reaper()")
            await api.daemon.until(lambda: is_gone(group), "killed")
        await until(flow.daemon, STATUS, job, "succeeded")
        worker.send_signal(signal.SIGTERM)
        _, output = worker.communicate()
    assert worker.returncode == 0
    assert b"lost: this lease token no longer holds the job" in output


async def test_deadline_and_second_signal_kill_the_command(api: Client, cli: Shell, flow: Flow) -> None:
    """At the deadline the command is killed and not retried; a second signal kills it and is reported."""
    with working(cli, "--", "sh", "-c", STAYS_ONCE) as worker:
        # If the command did not start before the deadline, try again with a later one.
        for seconds in (1.5, 3, 6, 12, 24):
            await api.daemon.until(lambda: waiting(api) == 1, "waiting")
            body = {"kind": KIND, "executor": "external_worker", "idempotency_key": f"late {seconds}"}
            soon = datetime.now(UTC) + timedelta(seconds=seconds)
            late = (await api.post("/v1/jobs", body | {"deadline_at": soon.isoformat()})).body["job_id"]
            await until(flow.daemon, STATUS, late, "cancelled")
            if (cli.folder / "began").exists():
                break
        async with command_started(api, cli.folder) as group:
            await api.daemon.until(lambda: is_gone(group), "killed")
        (cli.folder / "began").unlink()
        job = await enqueue(cli)
        async with command_started(api, cli.folder) as group:
            worker.send_signal(signal.SIGTERM)
            worker.send_signal(signal.SIGINT)
            _, output = worker.communicate()
            await api.daemon.until(lambda: is_gone(group), "killed")
    assert worker.returncode == 130
    lines = output.decode().splitlines()
    assert f"webhookd: job {late}, attempt 1: failed: DEADLINE_PASSED" in lines
    # Each signal prints what it does, and what the next one would do.
    assert lines[-3:] == [
        "webhookd: waiting for 1 job to finish; signal again to stop it",
        "webhookd: stopping 1 command",
        f"webhookd: job {job}, attempt 1: failed: WORKER_STOPPED",
    ]
    shown = (await api.get(f"/v1/jobs/{job}")).body
    assert shown["last_error_code"] == "WORKER_STOPPED"


@pytest.mark.parametrize(
    "orders",
    [
        # Three at once: commands are killed without SIGTERM first.
        (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        # A signal with a terminal key, and one without a meaning here.
        (signal.SIGQUIT, signal.SIGUSR2),
        (signal.SIGUSR1, signal.SIGALRM),
    ],
    ids=lambda orders: "+".join(order.name for order in orders),
)
async def test_no_signal_leaves_a_command_behind(
    api: Client, cli: Shell, orders: tuple[signal.Signals, ...]
) -> None:
    """Except for SIGKILL, every end of the worker kills its command, which ignores signals."""
    await enqueue(cli)
    stubborn = f"trap '' TERM INT HUP; {STAYS_ONCE}"
    with working(cli, "--", "sh", "-c", stubborn) as worker:
        async with command_started(api, cli.folder) as group:
            for order in orders:
                worker.send_signal(order)
            assert worker.wait() == 130
            await api.daemon.until(lambda: is_gone(group), "killed")


async def test_other_slots_finish_after_one_fails(tmp_path: Path) -> None:
    """An unreadable answer ends the worker; jobs in other slots are still renewed and reported."""
    (tmp_path / "go").touch()
    async with NonsenseDaemon() as daemon:
        cli = Shell(tmp_path, {"WEBHOOKD_URL": f"http://127.0.0.1:{daemon.port}"})
        words = (
            "--concurrency",
            "3",
            "--lease-seconds",
            "6",
            "--",
            "sh",
            "-c",
            WHILE_GO,
        )
        with working(cli, *words) as worker:
            assert worker.stderr is not None
            output = await asyncio.to_thread(worker.stderr.readline)
            assert b"does not understand" in output
            kept = daemon.renewals
            # The lease is renewed while the claim of the third slot is unanswered.
            await until_true(lambda: daemon.renewals > kept)
            (tmp_path / "go").unlink()
            await until_true(lambda: daemon.succeeded == 1)
            _, rest = await asyncio.to_thread(worker.communicate)
    assert worker.returncode == 1
    assert b"succeeded" in rest


class NonsenseDaemon:
    """Returns one job, then an invalid answer, and then leaves claims unanswered."""

    def __init__(self) -> None:
        self.claims = self.renewals = self.succeeded = 0

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.add_routes(
            [web.post("/v1/jobs/claim", self._claim), web.post("/v1/jobs/{id}/{action}", self._report)]
        )
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _claim(self, _: web.Request) -> web.Response:
        self.claims += 1
        match self.claims:
            case 1:
                job = {"job_id": "1", "job_kind": KIND, "attempt": 1, "lease_token": "t", "deadline_at": None}
                return web.json_response(job | {"claimed_at": datetime.now(UTC).isoformat()})
            case 2:
                await until_true(lambda: self.renewals > 0 and self.claims > 2)
                return web.json_response({"job": "none"})
            case _:
                await asyncio.Event().wait()
                raise AssertionError

    async def _report(self, request: web.Request) -> web.Response:
        self.renewals += request.match_info["action"] == "progress"
        self.succeeded += request.match_info["action"] == "succeed"
        return web.json_response({})


def waiting(api: Client) -> float:
    """Number of waiting claims."""
    return api.daemon.metric("webhookd_job_queue_claims_waiting")


async def test_work_waits_for_the_daemon(api: Client, cli: Shell, flow: Flow) -> None:
    """The worker waits for a disabled queue or a dead daemon. A signal ends it: 0, or 130 with --once."""
    await cli.done("jobs", "disable")
    with working(cli, "--concurrency", "3", "--", "true") as worker:
        assert worker.stderr is not None
        assert b"the job queue is disabled" in worker.stderr.readline()
        await cli.done("jobs", "enable")
        assert b"claiming jobs again" in worker.stderr.readline()
        api.daemon.kill()
        assert b"; waiting" in worker.stderr.readline()
        await api.daemon.start()
        jobs = [await enqueue(cli) for _ in range(4)]
        for job in jobs:
            await until(flow.daemon, STATUS, job, "succeeded")
        await api.daemon.until(lambda: waiting(api) == 3, "waiting")
        worker.send_signal(signal.SIGTERM)
        worker.communicate()
    assert worker.returncode == 0
    for order in (signal.SIGINT, signal.SIGTERM):
        with working(cli, "--once", "--", "true") as worker:
            await api.daemon.until(lambda: waiting(api) == 1, "waiting")
            worker.send_signal(order)
            worker.communicate()
        # No job was run.
        assert worker.returncode == 130
        await api.daemon.until(lambda: waiting(api) == 0, "left")
    refused = await cli.having(WEBHOOKD_TOKEN="x").run("jobs", "work", "--kind", "a\nb", "--", "true")
    assert (refused.exit_code, refused.error.endswith("(invalid_request)")) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["enqueue", KIND, "--deadline", "2026-01-31T08:00:00Z"], "2026-01-31T08:00:00Z has passed"),
        (["enqueue", KIND, "--deadline", "0s"], "0s has passed"),
        (["enqueue", KIND, "--deadline", "1h", "--after", "2h"], "--deadline must be after --after"),
        (["requeue", UNKNOWN_ID, "--deadline", "2026-01-31T08:00:00Z"], "has passed"),
        (["enqueue", KIND, "--key", ""], "'--key' / '--idempotency-key': it must not be empty"),
        (["enqueue", ""], "'KIND': it must not be empty"),
        (["enqueue", KIND, "--payload-ref", ""], "'--payload-ref': it must not be empty"),
        (["list", "--kind", ""], "'--kind': it must not be empty"),
        (["cancel", UNKNOWN_ID, "--reason", " "], "'--reason': it must not be empty"),
        (["register", "order.created", ""], "'KIND': it must not be empty"),
        (["work", "--kind", "", "--", "true"], "'--kind': it must not be empty"),
        (["configure", "--max-attempts", "0"], "must be a whole number from 1 to 1000"),
        (["configure", "--max-attempts", "1.5"], "must be a whole number from 1 to 1000"),
        (["configure", "--jitter", "nan"], "must be a number from 0 to 1 "),
        (["configure", "--kind", "", "--jitter", "0"], "'--kind': it must not be empty"),
        (["enqueue", KIND, "--workflow", "abc"], "'--workflow': abc is not a workflow id"),
        (["enqueue", KIND, "--parent", "abc"], "'--parent': abc is not a job id"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_wrong_options_are_refused(lonely: Shell, words: list[str], message: str) -> None:
    """Exit code 2 and a clear message, without a request to the daemon."""
    ran = await lonely.run("jobs", *words)
    assert (ran.exit_code, ran.out) == (2, "")
    assert message in ran.error
