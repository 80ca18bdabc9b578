"""`webhookd status`: what an operator asks first, on one screen, once or again and again."""

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NoReturn

import click
from rich.console import Group, RenderableType
from rich.live import Live

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import example, json_option
from webhookd.cli.text import count, duration, escaped
from webhookd.core.errors import ServiceUnavailable

NOT_READY = 1
RUNNING = "running"


@click.command(
    "status",
    epilog=example("webhookd status", "webhookd status --watch --interval 5"),
)
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval",
    "interval_seconds",
    type=click.FloatRange(min=0.1, max=3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
@json_option
@asks_daemon
def command(client: Client, *, watch: bool, interval_seconds: float, as_json: bool) -> None:
    """Show whether a daemon is ready, what waits, what fails.

    Exit code 0: it is ready; 1: it is not; 69: it does not answer.
    """
    if watch:
        _watch(client, interval_seconds, as_json=as_json)
    answer = client.get("/status")
    status = answer.value
    if as_json:
        output.show_json(answer.body)
    else:
        output.show(*screen(status, client))
    if not status.get("ready"):
        sys.exit(NOT_READY)


def _watch(client: Client, interval_seconds: float, *, as_json: bool) -> NoReturn:
    """Ctrl-C ends it. A daemon that goes away is said to be away until it is back."""
    to = output.console()
    if as_json or output.is_plain(to):
        while True:
            _print_once(client, as_json=as_json)
            time.sleep(interval_seconds)
    with Live(console=to, auto_refresh=False) as live:
        last: list[RenderableType] = []
        while True:
            try:
                last = list(screen(client.get("/status").value, client))
                live.update(Group(*last), refresh=True)
            except ServiceUnavailable as error:
                live.update(Group(_away(error), *last[1:]), refresh=True)
            time.sleep(interval_seconds)


def _print_once(client: Client, *, as_json: bool) -> None:
    try:
        answer = client.get("/status")
    except ServiceUnavailable as error:
        click.echo(f"webhookd: {error}", err=True)
        return
    if as_json:
        output.show_json(answer.body)
    else:
        output.show(*screen(answer.value, client), "")


def screen(status: dict[str, Any], client: Client) -> Iterator[RenderableType]:
    """What /status says, for a person; the first line is the answer."""
    reasons = ", ".join(map(escaped, status.get("unready_because", [])))
    yield (
        output.line(output.state("ready"), f"  {client.place.url.geturl()}")
        if status.get("ready")
        else output.line(output.state("not ready", f"not ready: {reasons}"), f"  {client.place.url.geturl()}")
    )
    configuration = status.get("configuration", {})
    yield output.fields(
        [
            ("instance", output.text(status.get("worker_id"))),
            ("version", output.text(status.get("version"))),
            ("started", output.time_field(status.get("started_at"))),
            ("configuration", _configuration(configuration)),
            ("retry", _retry(status.get("retry", {}))),
            ("services", _running(status.get("services", []))),
            ("dead letters", _dead_letters(status.get("dead_letters_of_a_day"))),
            *_jobs(status.get("job_queue")),
        ]
    )
    # What needs somebody first: a small screen is cut off at its end.
    yield from _troubled(status.get("services", []))
    yield from _failing(status.get("failing_endpoints"))
    yield from _backlog(status.get("backlog"))


def _running(services: list[dict[str, Any]]) -> output.Cell:
    """Those that run, in a line: it is long, and nearly always all of them."""
    names = [escaped(service["name"]) for service in services if service["state"] == RUNNING]
    return output.state(RUNNING, ", ".join(names)) if names else output.state("not ready", "none runs")


def _troubled(services: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """Those that do not run, or did not all the time."""
    troubled = [service for service in services if service["state"] != RUNNING or service["restarts"]]
    if not troubled:
        return
    yield output.heading("Services that failed")
    yield output.table(
        ["service", "state", "restarts", "last error"],
        [
            (
                output.text(service["name"]),
                output.state(service["state"]),
                str(service["restarts"]),
                output.text(service["last_error"]),
            )
            for service in troubled
        ],
    )


def _backlog(backlog: dict[str, Any] | None) -> Iterator[RenderableType]:
    yield output.heading("Waiting to be delivered")  # jobs that wait have a line above
    if backlog is None:
        yield "not counted yet"
        return
    most = backlog["counted_up_to"]
    stages = [stage for stage in backlog["stages"] if stage["waiting"]]
    if not stages:
        yield "nothing"
        return
    yield output.table(
        ["stage", "waiting", "oldest"],
        [
            (
                output.text(stage["stage"]),
                count(stage["waiting"], most),
                output.time_cell(stage["oldest_at"]),
            )
            for stage in stages
        ],
    )


def _dead_letters(of_a_day: int | None) -> output.Cell:
    if of_a_day is None:
        return output.NONE
    told = f"{of_a_day} in the last 24 hours"
    return output.state("failing", f"{told}: webhookd dead-letters list") if of_a_day else told


def _jobs(queue: dict[str, Any] | None) -> Iterator[tuple[str, output.Cell]]:
    """A line about the job substrate, if it is on or has something in it."""
    worth_it = ("enabled", "backlog", "in_progress", "dead_letter_open")
    if not queue or not any(queue[name] for name in worth_it):
        return
    state = "" if queue["enabled"] else "off; "
    queued, held, dead = (count(queue[name], queue["counted_up_to"]) for name in worth_it[1:])
    counts = f"{state}{queued} queued, {held} in progress"
    letters = "dead letter" if queue["dead_letter_open"] == 1 else "dead letters"
    lost = f", {dead} {letters}: webhookd jobs list --status dead_letter"
    yield "jobs", output.state("failing", counts + lost) if queue["dead_letter_open"] else counts


def _failing(endpoints: list[dict[str, Any]] | None) -> Iterator[RenderableType]:
    if not endpoints:
        return
    yield output.heading("Failing endpoints")
    yield output.table(
        ["subscription", "since", "failures in a row", "last error"],
        [
            (
                str(endpoint["subscription_id"]),
                output.time_cell(endpoint["failing_since"]),
                str(endpoint["consecutive_failures"]),
                output.text(endpoint["last_error_code"]),
            )
            for endpoint in endpoints
        ],
    )


def _configuration(configuration: dict[str, Any]) -> output.Cell:
    read = f"read {output.time_field(configuration.get('last_read_at'))}"
    if not configuration.get("last_reload_successful", True):
        return output.state("failing", f"{read}, and refused: {configuration.get('last_reload_error')}")
    if needed := configuration.get("restart_needed"):
        return output.line(read, output.state("paused", f"; a restart is needed for {', '.join(needed)}"))
    return read


def _retry(retry: dict[str, Any]) -> str:
    if not retry:
        return output.NONE
    delays = f"{duration(retry['base_delay_seconds'])}, doubled up to {duration(retry['max_delay_seconds'])}"
    return f"{retry['max_attempts']} attempts, delays of {delays}, jitter {retry['jitter']:g}"


def _away(error: ServiceUnavailable) -> RenderableType:
    now = f"{datetime.now(UTC):%H:%M:%S}"
    return output.line(
        output.state("unreachable"), f"  {now} UTC: {error}; what follows is what it last said"
    )
