"""`webhookd status`: shows a daemon's /status document on one screen, once or repeatedly."""

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
from webhookd.cli.options import escaped, example, json_option
from webhookd.cli.output import count, duration
from webhookd.core.errors import ServiceUnavailable
from webhookd.core.limits import ONE_DAY_SECONDS
from webhookd.core.settings import SERVICES

NOT_READY = 1
RUNNING = "running"
# The stages of /status.
WAITING = {
    "routing": "events to route",
    "orchestration": "deliveries to start",
    "delivery": "attempts to send",
    "results": "results to apply",
    "retry": "retries that are not due yet",
    "held": "deliveries on hold: their subscription is held",
}


@click.command(
    "status",
    epilog=example("webhookd status", "webhookd status --watch --interval 5"),
)
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option(
    "--interval",
    "interval_seconds",
    type=click.FloatRange(min=0.1, max=3600),
    default=2.0,
    show_default=True,
    help="Seconds between two refreshes of --watch.",
)
@json_option
@asks_daemon
def command(client: Client, *, watch: bool, interval_seconds: float, as_json: bool) -> None:
    """Show whether a daemon is ready, how much work is waiting, and what fails.

    Exit code 0: the daemon is ready. 1: it is not ready. 69: it does not respond.
    """
    if watch:
        _watch(client, interval_seconds, as_json=as_json)
    answer = client.get("/status")
    output.show_answer(answer, lambda answer: screen(answer.value, client), as_json=as_json)
    if not answer.value.get("ready"):
        sys.exit(NOT_READY)


def _watch(client: Client, interval_seconds: float, *, as_json: bool) -> NoReturn:
    """Refresh until Ctrl-C, also while the daemon is unreachable."""
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
                live.update(Group(_unreachable(error), *last[1:]), refresh=True)
            time.sleep(interval_seconds)


def _print_once(client: Client, *, as_json: bool) -> None:
    try:
        answer = client.get("/status")
    except ServiceUnavailable as error:
        click.echo(f"webhookd: {error}", err=True)
    else:
        output.show_answer(answer, lambda answer: [*screen(answer.value, client), ""], as_json=as_json)


def screen(status: dict[str, Any], client: Client) -> Iterator[RenderableType]:
    """Render a /status document. The first line says whether the daemon is ready."""
    reasons = ", ".join(map(escaped, status.get("unready_because", [])))
    state = (
        output.state("ready") if status.get("ready") else output.state("not ready", f"not ready: {reasons}")
    )
    yield output.line(state, f"  {client.place.url.geturl()}")
    yield output.fields(
        [
            ("instance", output.text(status.get("worker_id"))),
            ("version", output.text(status.get("version"))),
            ("started", output.time_field(status.get("started_at"))),
            ("configuration", _configuration(status.get("configuration", {}))),
            ("retries", _retries(status.get("retry", {}))),
            ("services", _running(status.get("services", []))),
            *_in_flight(status.get("in_flight")),
            ("dead letters", _dead_letters(status.get("dead_letters_of_a_day"))),
            *_retention(status.get("retention")),
            *_jobs(status.get("job_queue")),
        ]
    )
    # Problems come first: a small screen cuts off the end.
    yield from _failed_services(status.get("services", []))
    yield from _failing_endpoints(status.get("failing_endpoints"))
    yield from _waiting(status.get("backlog"))


def _running(services: list[dict[str, Any]]) -> output.Cell:
    """List the running services of services.enabled. Internal services are shown only when they fail."""
    names = [
        service["name"] for service in services if service["state"] == RUNNING and service["name"] in SERVICES
    ]
    return output.state(RUNNING, ", ".join(names)) if names else output.state("not ready", "none is running")


def _failed_services(services: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """Show the services that do not run, or were restarted since the daemon started."""
    failed = [service for service in services if service["state"] != RUNNING or service["restarts"]]
    if not failed:
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
            for service in failed
        ],
    )


def _in_flight(in_flight: dict[str, Any] | None) -> Iterator[tuple[str, output.Cell]]:
    if in_flight:
        requests = f"{in_flight['requests']} of {in_flight['concurrency']}"
        yield "requests in flight", f"{requests} (this instance)"


def _waiting(backlog: dict[str, Any] | None) -> Iterator[RenderableType]:
    yield output.heading("Waiting to be delivered")
    if backlog is None:
        yield "not counted yet"
        return
    most = backlog["counted_up_to"]
    stages = {stage["stage"]: stage for stage in backlog["stages"] if stage["waiting"]}
    rows = [
        (text, count(stages[name]["waiting"], most), output.time_cell(stages[name]["oldest_at"]))
        for name, text in WAITING.items()
        if name in stages
    ]
    yield output.table(["work", "count", "oldest"], rows) if rows else "nothing"


def _dead_letters(of_a_day: int | None) -> output.Cell:
    if of_a_day is None:
        return output.NONE
    text = f"{of_a_day} in the last 24 hours"
    return output.state("failing", f"{text}: webhookd dead-letters list") if of_a_day else text


def _retention(retention: dict[str, Any] | None) -> Iterator[tuple[str, output.Cell]]:
    """Show retention if a period is set for events, or an erasure runs."""
    if not retention or not (retention["events_days"] or retention["erasures_running"]):
        return
    parts = []
    lag_seconds = retention["lag_seconds"]
    if lag_seconds is not None:
        parts.append(f"events are removed after {duration(retention['events_days'] * ONE_DAY_SECONDS)}")
    if lag_seconds:
        parts.append(f"{duration(lag_seconds)} behind")
    if running := retention["erasures_running"]:
        parts.append(f"{running} {'erasure' if running == 1 else 'erasures'} running")
    yield "retention", "; ".join(parts)


def _jobs(queue: dict[str, Any] | None) -> Iterator[tuple[str, output.Cell]]:
    """Show the job queue if it is enabled or not empty."""
    relevant = ("enabled", "backlog", "in_progress", "dead_letter_open")
    if not queue or not any(queue[name] for name in relevant):
        return
    state = "" if queue["enabled"] else "disabled; "
    queued, in_progress, dead = (count(queue[name], queue["counted_up_to"]) for name in relevant[1:])
    counts = f"{state}{queued} queued, {in_progress} in progress"
    letters = "dead letter" if queue["dead_letter_open"] == 1 else "dead letters"
    lost = f", {dead} {letters}: webhookd jobs list --status dead_letter"
    yield "jobs", output.state("failing", counts + lost) if queue["dead_letter_open"] else counts


def _failing_endpoints(endpoints: list[dict[str, Any]] | None) -> Iterator[RenderableType]:
    if not endpoints:
        return
    yield output.heading("Failing endpoints")
    yield output.table(
        ["subscription", "failing since", "failures in a row", "last error"],
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
    loaded = f"loaded {output.time_field(configuration.get('last_read_at'))}"
    if not configuration.get("last_reload_successful", True):
        error = escaped(configuration.get("last_reload_error"))
        return output.state("failing", f"rejected {loaded.removeprefix('loaded ')}: {error}")
    if needed := configuration.get("restart_needed"):
        return output.line(loaded, output.state("paused", f"; restart to apply {', '.join(needed)}"))
    return loaded


def _retries(retry: dict[str, Any]) -> str:
    if not retry:
        return output.NONE
    names = ("max_attempts", "base_delay_seconds", "max_delay_seconds")
    first, longest = duration(retry["base_delay_seconds"]), duration(retry["max_delay_seconds"])
    jitter = f", jitter {retry['jitter']:g}" if retry["jitter"] else ""
    return (
        f"{output.retry_schedule(*(retry[name] for name in names))}; first retry after {first}, "
        f"delay doubled up to {longest}{jitter}"
    )


def _unreachable(error: ServiceUnavailable) -> RenderableType:
    now = f"{datetime.now(UTC):%H:%M:%S}"
    return output.line(output.state("unreachable"), f"  {now} UTC: {error}; the last known status follows")
