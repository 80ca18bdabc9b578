"""`webhookd jobs`: work for executors outside of webhookd: given, looked at, resolved."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any
from uuid import uuid4

import click
import msgspec
from rich.console import RenderableType

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import (
    event_id,
    example,
    executor_option,
    job_id,
    json_option,
    listing_options,
    one_more,
    priority_option,
    read_bounded,
    some_text,
    time_or_delay,
    time_to_come,
    workflow_id,
)
from webhookd.cli.text import escaped, excerpt
from webhookd.core.states import WorkStatus
from webhookd.jobqueue.cli import switch as job_switch
from webhookd.jobqueue.cli import work as job_work

MAX_SAFE_PAYLOAD_BYTES = 64 * 1024
PAYLOAD_CHARACTERS = 2000


@click.group("jobs")
def command() -> None:
    """Work for executors outside of webhookd: give it, do it, look after it."""


@command.command(
    "enqueue",
    epilog=example(
        "webhookd jobs enqueue thumbnail.make --key picture-7 --payload-ref s3://pictures/7.png",
        "webhookd jobs enqueue report.send --safe-payload '{\"month\": 3}' --after 2h",
    ),
)
@click.argument("kind", type=some_text)
@executor_option("Who shall do it.")
@click.option(
    "--key",
    "--idempotency-key",
    type=some_text,
    metavar="KEY",
    help="With the same key it is the same job (default: a new one).",
)
@click.option("--source-ref", type=some_text, metavar="REF", help="Where what it is about is.")
@click.option("--target-ref", type=some_text, metavar="REF", help="Where its result belongs.")
@click.option("--payload-ref", type=some_text, metavar="REF", help="Where its data is.")
@click.option(
    "--safe-payload",
    metavar="JSON",
    help="A small JSON object, or @FILE, or - for stdin: a signal, not the data. Its top level must not have "
    "body, content, raw, vector, embedding, secret, token, password, ssn or personal_data.",
)
@priority_option
@click.option("--after", type=time_or_delay, metavar="TIME", help="Not before this time, or in 2h as 2h.")
@click.option("--deadline", type=time_to_come, metavar="TIME", help="Cancel it if it waits at this time.")
@click.option(
    "--correlation-id", type=some_text, metavar="ID", help="Travels with it, and with the events about it."
)
@click.option("--event", type=event_id, metavar="ID", help="The event that it follows from.")
@click.option("--workflow", type=workflow_id, metavar="ID", help="The workflow that it belongs to.")
@click.option("--parent", type=job_id, metavar="ID", help="The job it comes from: a link, it orders nothing.")
@json_option
@asks_daemon
def enqueue(
    client: Client, *, kind: str, key: str | None, safe_payload: str | None, as_json: bool, **given: Any
) -> None:
    """Enqueue a job of a KIND, and print its id.

    With the key of a job that was there already it is that job: its id is followed by `duplicate` and how it
    stands, for it may be over. The content must be the same too: executor, refs, safe payload, workflow and
    parent.
    """
    _require_in_order(given["after"], given["deadline"])
    asked = {
        "kind": kind,
        "executor": given["executor"],
        "idempotency_key": key or uuid4().hex,
        "source_ref": given["source_ref"],
        "target_ref": given["target_ref"],
        "payload_ref": given["payload_ref"],
        "safe_payload": None if safe_payload is None else _object(safe_payload),
        "priority": given["priority"],
        "process_after": given["after"],
        "deadline_at": given["deadline"],
        "correlation_id": given["correlation_id"],
        "causation_event_id": given["event"],
        "workflow_id": given["workflow"],
        "parent_job_id": given["parent"],
    }
    answer = client.post("/v1/jobs", {name: value for name, value in asked.items() if value is not None})
    if as_json:
        output.show_json(answer.body)
        return
    enqueued = answer.value
    was_there = f" duplicate {escaped(enqueued['status'])}" if enqueued["duplicate"] else ""
    click.echo(f"{enqueued['job_id']}{was_there}")


@command.command("list", epilog=example("webhookd jobs list --status dead_letter --kind thumbnail.make"))
@click.option(
    "--status", type=click.Choice([status.value for status in WorkStatus]), help="Only those in this state."
)
@click.option("--kind", type=some_text, metavar="KIND", help="Only those of this kind.")
@listing_options
@asks_daemon
def list_(client: Client, *, status: str | None, kind: str | None, limit: int | None, as_json: bool) -> None:
    """List jobs, the newest first."""
    output.list_rows(
        client.rows("/v1/jobs", {"status": status, "kind": kind}, one_more(limit)),
        ["id", "kind", "executor", "status", "attempts", "enqueued", "next / error"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="There are no such jobs.",
    )


@command.command("show", epilog=example("webhookd jobs show 0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262"))
@click.argument("one", metavar="ID", type=job_id)
@json_option
@asks_daemon
def show(client: Client, *, one: str, as_json: bool) -> None:
    """Show a job, and all its moves."""
    output.show_answer(client.get(f"/v1/jobs/{one}"), lambda told: _parts(told.fields), as_json=as_json)


@command.command("cancel", epilog=example("webhookd jobs cancel 0b9c… --reason 'not wanted any more'"))
@click.argument("one", metavar="ID", type=job_id)
@click.option("--reason", type=some_text, metavar="TEXT", required=True, help="Why, for the record.")
@json_option
@asks_daemon
def cancel(client: Client, *, one: str, reason: str, as_json: bool) -> None:
    """Cancel a job that nobody holds; a dead letter is resolved thereby."""
    answer = client.post(f"/v1/jobs/{one}/cancel", {"reason": reason})
    if as_json:
        output.show_json(answer.body)
    else:
        click.echo(f"job {one}: cancelled{' before' if answer.value['duplicate'] else ''}")


@command.command("requeue", epilog=example("webhookd jobs requeue 0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262"))
@click.argument("one", metavar="ID", type=job_id)
@click.option("--deadline", type=time_to_come, metavar="TIME", help="Cancel the new job if it waits then.")
@json_option
@asks_daemon
def requeue(client: Client, *, one: str, deadline: str | None, as_json: bool) -> None:
    """Try a dead letter again, as a new job; only once."""
    answer = client.post(f"/v1/jobs/{one}/requeue", {} if deadline is None else {"deadline_at": deadline})
    if as_json:
        output.show_json(answer.body)
    else:
        click.echo(f"job {one}: requeued as job {answer.value['job_id']}")


for further in (*job_switch.COMMANDS, job_work.work):
    command.add_command(further)


def _require_in_order(after: str | None, deadline: str | None) -> None:
    if after and deadline and datetime.fromisoformat(deadline) <= datetime.fromisoformat(after):
        raise click.UsageError("--deadline must be after --after, or nobody could ever do it")


def _object(text: str) -> msgspec.Raw:
    if text == "-" or text.startswith("@"):
        data = read_bounded(text.removeprefix("@"), "--safe-payload", MAX_SAFE_PAYLOAD_BYTES)
    else:
        data = text.encode("utf-8", "surrogateescape")
    try:
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise click.UsageError(f"--safe-payload is no JSON object: {error}") from error


def _cells(row: Mapping[str, Any]) -> output.Row:
    waits = row["status"] in (WorkStatus.QUEUED, WorkStatus.RETRY_WAITING)
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
    """The payload stays as it is: it may have numbers that Python cannot hold."""
    known = {name: msgspec.json.decode(raw) for name, raw in job.items() if name != "safe_payload"}
    payload = bytes(job["safe_payload"]).decode("utf-8", "replace")
    yield output.line(f"job {known['job_id']}  ", output.state(known["status"]))
    yield output.fields([*_facts(known), ("safe payload", excerpt(payload, PAYLOAD_CHARACTERS))])
    yield output.heading("What was done with it")
    if known["more_runs"]:
        yield "…"
    yield output.table(["when", "what", "to", "attempts", "by"], map(_run_cells, known["runs"]))


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
        yield "held", f"by {output.text(job['lease_holder'])} until {output.time_field(job['leased_until'])}"
    yield "priority", str(job["priority"])
    most = job.get("max_attempts")  # which an older daemon does not say
    yield "attempts", str(job["attempts"]) if most is None else f"{job['attempts']} of {most}"
    if job["lease_recoveries"]:
        yield "leases lost", f"{job['lease_recoveries']} in its last attempt"
    if job["last_error_code"] is not None:
        said = f": {excerpt(job['last_error'], PAYLOAD_CHARACTERS)}" if job["last_error"] else ""
        yield "error", f"{output.text(job['last_error_code'])}{said}"
    if job["cancel_reason"] is not None:
        yield "cancelled", output.text(job["cancel_reason"])
    for name in ("causation_event_id", "workflow_id", "parent_job_id"):
        if job[name] is not None:
            yield name.removesuffix("_id").replace("_", " "), output.text(job[name])
    if job["requeued_as"] is not None:
        yield "requeued as", output.text(job["requeued_as"])
    if job["status"] == WorkStatus.DEAD_LETTER:
        yield "try again", f"webhookd jobs requeue {job['job_id']}"


def _run_cells(run: Mapping[str, Any]) -> output.Row:
    # Of a claim: who asked, and for whom.
    names = dict.fromkeys([run["actor"], run["detail"].get("lease_holder", run["actor"])])
    to, code = run["to_status"], run["detail"].get("error_code")
    # What becomes of a failed job is a row of its own, with the same code.
    said = f"{to}: {code}" if to == WorkStatus.FAILED and code is not None else to
    return (
        output.time_cell(run["run_at"]),
        output.text(run["command"].removeprefix("fn_job_")),
        output.state(to, said),
        str(run["attempts"]),
        ", ".join(map(output.text, names)),
    )
