"""`webhookd jobs`: enqueue, list, show, cancel and requeue jobs. The other commands: operate.py, work.py."""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import click
import msgspec
from rich.console import RenderableType

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import (
    escaped,
    event_id,
    example,
    json_option,
    listing_options,
    one_more,
    parsed_time,
    read_bounded,
    some_text,
)
from webhookd.cli.output import excerpt
from webhookd.jobqueue.cli import operate
from webhookd.jobqueue.cli.operate import executor_option, priority_option, show_line
from webhookd.jobqueue.cli.work import work
from webhookd.jobqueue.fields import JobStatus

MAX_SAFE_PAYLOAD_BYTES = 64 * 1024
PAYLOAD_CHARACTERS = 2000
# The options of `enqueue` whose field in the API has another name.
_FIELDS = {
    "after": "process_after",
    "deadline": "deadline_at",
    "event": "causation_event_id",
    "workflow": "workflow_id",
    "parent": "parent_job_id",
}


def _id_of(noun: str) -> Callable[[str], str]:
    def parsed(text: str) -> str:
        try:
            return str(UUID(text))
        except ValueError as error:
            raise click.BadParameter(f"{escaped(text)} is not a {noun} id") from error

    return parsed


_JOB_ID = _id_of("job")


def _time_or_delay(text: str) -> str:
    """A time such as 2026-01-31T08:00:00Z or a delay such as 2h, as RFC 3339."""
    now = datetime.now(UTC)
    try:
        time = parsed_time(text, now)
        time = time if ":" in text else now + (now - time)
        return time.isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{escaped(text)} is neither a time such as 2026-01-31T08:00:00Z nor a delay such as 2h"
        ) from error


def _future_time(text: str) -> str:
    time = _time_or_delay(text)
    if datetime.fromisoformat(time) <= datetime.now(UTC):
        raise click.BadParameter(f"{escaped(text)} has passed")
    return time


@click.group("jobs")
def command() -> None:
    """The job queue: jobs for executors outside webhookd."""


@command.command(
    "enqueue",
    epilog=example(
        "webhookd jobs enqueue thumbnail.make --key picture-7 --payload-ref s3://pictures/7.png",
        "webhookd jobs enqueue report.send --safe-payload '{\"month\": 3}' --after 2h",
    ),
)
@click.argument("kind", type=some_text)
@executor_option("Executor of the job.")
@click.option(
    "--key",
    "--idempotency-key",
    type=some_text,
    metavar="KEY",
    help="Idempotency key: the same kind and key is the same job (default: a random key).",
)
@click.option("--source-ref", type=some_text, metavar="REF", help="Reference to the source.")
@click.option("--target-ref", type=some_text, metavar="REF", help="Reference to where the result belongs.")
@click.option("--payload-ref", type=some_text, metavar="REF", help="Reference to the input data.")
@click.option(
    "--safe-payload",
    metavar="JSON",
    help="A small JSON object, @FILE, or - for stdin. Not the data itself: its top level must not have the "
    "keys body, content, raw, vector, embedding, secret, token, password, ssn or personal_data.",
)
@priority_option
@click.option(
    "--after", type=_time_or_delay, metavar="TIME", help="Earliest start: a time, or a delay such as 2h."
)
@click.option(
    "--deadline",
    type=_future_time,
    metavar="TIME",
    help="Cancel the job if it is still waiting at this time.",
)
@click.option("--correlation-id", type=some_text, metavar="ID", help="Copied into every event about the job.")
@click.option("--event", type=event_id, metavar="ID", help="The event that caused the job.")
@click.option("--workflow", type=_id_of("workflow"), metavar="ID", help="The workflow of the job.")
@click.option(
    "--parent", type=_JOB_ID, metavar="ID", help="The parent job. A link only: it does not affect the order."
)
@json_option
@asks_daemon
def enqueue(
    client: Client, *, key: str | None, safe_payload: str | None, as_json: bool, **given: Any
) -> None:
    """Enqueue a job of KIND and print its id.

    If a job with this kind and key exists, its id is printed with `duplicate` and its status. The content
    must be the same: executor, references, safe payload, workflow and parent.
    """
    after, deadline = given["after"], given["deadline"]
    if after and deadline and datetime.fromisoformat(deadline) <= datetime.fromisoformat(after):
        raise click.UsageError("--deadline must be after --after")
    job = {_FIELDS.get(name, name): value for name, value in given.items() if value is not None}
    job["idempotency_key"] = key or uuid4().hex
    if safe_payload is not None:
        job["safe_payload"] = _object(safe_payload)
    answer = client.post("/v1/jobs", job)

    def line(enqueued: dict[str, Any]) -> str:
        suffix = f" duplicate {escaped(enqueued['status'])}" if enqueued["duplicate"] else ""
        return f"{enqueued['job_id']}{suffix}"

    show_line(answer, line, as_json=as_json)


@command.command("list", epilog=example("webhookd jobs list --status dead_letter --kind thumbnail.make"))
@click.option(
    "--status", type=click.Choice([status.value for status in JobStatus]), help="Only jobs with this status."
)
@click.option("--kind", type=some_text, metavar="KIND", help="Only jobs of this kind.")
@listing_options
@asks_daemon
def list_(client: Client, *, status: str | None, kind: str | None, limit: int | None, as_json: bool) -> None:
    """List jobs, newest first."""
    output.list_rows(
        client.rows("/v1/jobs", {"status": status, "kind": kind}, one_more(limit)),
        ["id", "kind", "executor", "status", "attempts", "enqueued", "next attempt or error"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="No jobs found.",
    )


@command.command("show", epilog=example("webhookd jobs show 0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262"))
@click.argument("job", metavar="ID", type=_JOB_ID)
@json_option
@asks_daemon
def show(client: Client, *, job: str, as_json: bool) -> None:
    """Show a job and its transitions."""
    output.show_answer(client.get(f"/v1/jobs/{job}"), lambda answer: _parts(answer.fields), as_json=as_json)


@command.command("cancel", epilog=example("webhookd jobs cancel 0b9c… --reason 'no longer needed'"))
@click.argument("job", metavar="ID", type=_JOB_ID)
@click.option("--reason", type=some_text, metavar="TEXT", required=True, help="Reason, for the record.")
@json_option
@asks_daemon
def cancel(client: Client, *, job: str, reason: str, as_json: bool) -> None:
    """Cancel a waiting job, or resolve a dead letter."""
    show_line(
        client.post(f"/v1/jobs/{job}/cancel", {"reason": reason}),
        lambda cancelled: f"job {job}: {'already ' if cancelled['duplicate'] else ''}cancelled",
        as_json=as_json,
    )


@command.command("requeue", epilog=example("webhookd jobs requeue 0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262"))
@click.argument("job", metavar="ID", type=_JOB_ID)
@click.option("--deadline", type=_future_time, metavar="TIME", help="Deadline of the new job.")
@json_option
@asks_daemon
def requeue(client: Client, *, job: str, deadline: str | None, as_json: bool) -> None:
    """Requeue a dead letter as a new job. Possible once."""
    show_line(
        client.post(f"/v1/jobs/{job}/requeue", {} if deadline is None else {"deadline_at": deadline}),
        lambda requeued: f"job {job}: requeued as job {requeued['job_id']}",
        as_json=as_json,
    )


for subcommand in (*operate.COMMANDS, work):
    command.add_command(subcommand)


def _object(text: str) -> msgspec.Raw:
    if text == "-" or text.startswith("@"):
        data = read_bounded(text.removeprefix("@"), "--safe-payload", MAX_SAFE_PAYLOAD_BYTES)
    else:
        data = text.encode("utf-8", "surrogateescape")
    try:
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise click.UsageError(f"--safe-payload is not a JSON object: {error}") from error


def _cells(row: Mapping[str, Any]) -> output.Row:
    waits = row["status"] in (JobStatus.QUEUED, JobStatus.RETRY_WAITING)
    last = output.time_cell(row["process_after"]) if waits else output.text(row["last_error_code"])
    return (
        str(row["job_id"]),
        output.text(row["job_kind"]),
        output.text(row["executor"]),
        output.state(row["status"]),
        str(row["attempts"]),
        output.time_cell(row["enqueued_at"]),
        last,
    )


def _parts(job: Mapping[str, msgspec.Raw]) -> Iterator[RenderableType]:
    """The payload is shown as stored: it may have numbers that Python cannot represent."""
    known = {name: msgspec.json.decode(raw) for name, raw in job.items() if name != "safe_payload"}
    payload = bytes(job["safe_payload"]).decode("utf-8", "replace")
    yield output.line(f"job {known['job_id']}  ", output.state(known["status"]))
    yield output.fields([*_facts(known), ("safe payload", excerpt(payload, PAYLOAD_CHARACTERS))])
    yield output.heading("Transitions")
    if known["more_runs"]:
        yield "…"
    yield output.table(["time", "command", "status", "attempts", "actor"], map(_run_cells, known["runs"]))


def _facts(job: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    yield "kind", f"{output.text(job['job_kind'])}, for {output.text(job['executor'])}"
    yield "key", output.text(job["idempotency_key"])
    for name in ("source_ref", "target_ref", "payload_ref", "result_ref", "correlation_id", "status_signal"):
        if job[name] is not None:
            yield name.replace("_", " "), output.text(job[name])
    yield "enqueued", f"{output.time_field(job['enqueued_at'])} by {output.text(job['enqueued_by'])}"
    for name in ("process_after", "deadline_at", "started_at", "finished_at"):
        if job[name] is not None:
            yield name.removesuffix("_at").replace("_", " "), output.time_field(job[name])
    if job["leased_until"] is not None:
        until = output.time_field(job["leased_until"])
        yield "leased", f"by {output.text(job['lease_holder'])} until {until}"
    yield "priority", str(job["priority"])
    limit = job.get("max_attempts")  # missing from an older daemon's answer
    yield "attempts", str(job["attempts"]) if limit is None else f"{job['attempts']} of {limit}"
    if job["lease_recoveries"]:
        yield "expired leases", f"{job['lease_recoveries']} in the last attempt"
    if job["last_error_code"] is not None:
        message = f": {excerpt(job['last_error'], PAYLOAD_CHARACTERS)}" if job["last_error"] else ""
        yield "error", f"{output.text(job['last_error_code'])}{message}"
    if job["cancel_reason"] is not None:
        yield "cancelled", output.text(job["cancel_reason"])
    for name in ("causation_event_id", "workflow_id", "parent_job_id"):
        if job[name] is not None:
            yield name.removesuffix("_id").replace("_", " "), output.text(job[name])
    if job["requeued_as"] is not None:
        yield "requeued as", output.text(job["requeued_as"])
    if job["status"] == JobStatus.DEAD_LETTER:
        yield "requeue with", f"webhookd jobs requeue {job['job_id']}"


def _run_cells(run: Mapping[str, Any]) -> output.Row:
    # For a claim: the caller and the lease holder.
    names = dict.fromkeys([run["actor"], run["detail"].get("lease_holder", run["actor"])])
    to, code = run["to_status"], run["detail"].get("error_code")
    # The next state of a failed job is a row of its own, with the same error code.
    status = f"{to}: {code}" if to == JobStatus.FAILED and code is not None else to
    return (
        output.time_cell(run["run_at"]),
        output.text(run["command"].removeprefix("fn_job_")),
        output.state(to, status),
        str(run["attempts"]),
        ", ".join(map(output.text, names)),
    )
