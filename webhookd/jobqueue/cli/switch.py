"""`webhookd jobs status | enable | disable | configure | register`: the operator's part of the substrate."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
import msgspec
from rich.console import RenderableType

from webhookd.cli import output
from webhookd.cli.client import Answer, Client, asks_daemon
from webhookd.cli.options import example, executor_option, json_option, priority_option, some_text
from webhookd.cli.text import count, duration, escaped
from webhookd.core.limits import MAX_ATTEMPTS, MAX_JOB_DELAY_SECONDS, MAX_LEASE_RECOVERIES

PATH = "/v1/job-substrate"
DEFAULT = "default"
_NUMBERS = (
    "max_attempts",
    "base_delay_seconds",
    "max_delay_seconds",
    "jitter",
    "max_lease_recoveries",
    "retention_seconds",
)


@click.command("status", epilog=example("webhookd jobs status"))
@json_option
@asks_daemon
def status(client: Client, *, as_json: bool) -> None:
    """Show whether jobs are on, what waits, by what numbers, and which events give jobs."""
    output.show_answer(client.get(PATH), _screen, as_json=as_json)


@click.command("enable", epilog=example("webhookd jobs enable"))
@json_option
@asks_daemon
def enable(client: Client, *, as_json: bool) -> None:
    """Switch jobs on, for all instances and for executors that speak SQL."""
    _switch(client, on=True, as_json=as_json)


@click.command("disable", epilog=example("webhookd jobs disable"))
@json_option
@asks_daemon
def disable(client: Client, *, as_json: bool) -> None:
    """Switch jobs off: nothing is enqueued or claimed any more; what runs may end."""
    _switch(client, on=False, as_json=as_json)


def _number(lowest: int, highest: int, *, whole: bool = False) -> Callable[[str], float | str]:
    """As fn_job_configure has it, in words for a person."""

    def parsed(text: str) -> float | str:
        if text == DEFAULT:
            return text
        try:
            value = float(text)
        except ValueError as error:
            raise click.BadParameter(f"{escaped(text)} is no number") from error
        if not lowest <= value <= highest or (whole and not value.is_integer()):
            kind = "whole number" if whole else "number"
            raise click.BadParameter(f"it must be a {kind} from {lowest} to {highest}")
        # What is whole must be whole in JSON too.
        return int(value) if value.is_integer() else value

    return parsed


_SECONDS = _number(0, MAX_JOB_DELAY_SECONDS)


@click.command(
    "configure",
    epilog=example(
        "webhookd jobs configure --max-attempts 10 --retention-seconds 86400",
        "webhookd jobs configure --kind report.send --max-attempts 1",
        "webhookd jobs configure --kind report.send --max-attempts default",
    ),
)
@click.option(
    "--kind",
    type=some_text,
    metavar="KIND",
    help="For this kind alone; `default` as a number is that of all others again.",
)
@click.option(
    "--max-attempts",
    type=_number(1, MAX_ATTEMPTS, whole=True),
    metavar="N",
    help="Attempts in all, the first included.",
)
@click.option("--base-delay-seconds", type=_SECONDS, metavar="S", help="After a failure, doubled each time.")
@click.option("--max-delay-seconds", type=_SECONDS, metavar="S", help="The longest delay.")
@click.option("--jitter", type=_number(0, 1), metavar="PART", help="Up to this part of a delay is added.")
@click.option(
    "--max-lease-recoveries",
    type=_number(0, MAX_LEASE_RECOVERIES, whole=True),
    metavar="N",
    help="Leases lost before it counts as a failure.",
)
@click.option("--retention-seconds", type=_SECONDS, metavar="S", help="How long an ended job is kept whole.")
@json_option
@asks_daemon
def configure(client: Client, *, kind: str | None, as_json: bool, **numbers: float | str | None) -> None:
    """Set numbers in the database, for all instances.

    An instance whose configuration has a number in [jobs] writes that again when it starts.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    if not given:
        raise click.UsageError("give a number")
    if kind is None and DEFAULT in given.values():
        raise click.UsageError(f"{DEFAULT}: only a kind's own number has one")
    change: dict[str, object] = {n: None if value == DEFAULT else value for n, value in given.items()}
    asked = {"policy": change} if kind is None else {"kind_policy": change | {"job_kind": kind}}
    output.show_answer(client.patch(PATH, asked), _screen, as_json=as_json)


@click.command(
    "register",
    epilog=example(
        "webhookd jobs register order.created invoice.make --priority 5",
        "webhookd jobs register order.created invoice.make --off",
    ),
)
@click.argument("event_type", type=some_text)
@click.argument("kind", type=some_text)
@executor_option("Who shall do them.")
@priority_option
@click.option("--off", is_flag=True, help="No more, from now on; the rest of it stays as it is.")
@json_option
@asks_daemon
def register(
    client: Client, *, event_type: str, kind: str, executor: str, priority: int, off: bool, as_json: bool
) -> None:
    """Let every event of EVENT_TYPE give one job of KIND, from now on.

    What is registered already is changed: to this executor and priority, or to their defaults.
    """
    which = {"event_type": event_type, "job_kind": kind}
    how = {"active": False} if off else {"executor": executor, "priority": priority}
    answer = client.post("/v1/job-registrations", which | how)
    if as_json:
        output.show_json(answer.body)
    else:
        is_now = answer.value
        gives = "give" if is_now["active"] else "give no more"
        words = f"{escaped(event_type)} events {gives} {escaped(kind)} jobs for {escaped(is_now['executor'])}"
        click.echo(f"{words}, priority {is_now['priority']}" if is_now["priority"] else words)


COMMANDS = (status, enable, disable, configure, register)


def _switch(client: Client, *, on: bool, as_json: bool) -> None:
    answer = client.patch(PATH, {"enabled": on})
    if as_json:
        output.show_json(answer.body)
    else:
        click.echo(f"jobs are {'on' if answer.value['enabled'] else 'off'}")


def _screen(answer: Answer) -> Iterator[RenderableType]:
    substrate = answer.value
    queue, policy = substrate["queue"], substrate["policy"]
    yield output.line(
        "jobs are ", output.state("active", "on") if substrate["enabled"] else output.state("paused", "off")
    )
    age = queue["oldest_queued_age_s"]
    oldest = "" if age is None else f", the oldest for {duration(max(0.0, age))}"

    def told(name: str) -> str:
        return count(queue[name], queue["counted_up_to"])

    yield output.fields(
        [
            ("queued", f"{told('backlog')}{oldest}"),
            ("of these for later", told("scheduled")),
            ("in progress", f"{told('in_progress')}, {told('lease_active')} with a lease that runs"),
            ("to be retried", told("retry_waiting")),
            ("dead letters", told("dead_letter_open")),
            ("events waiting", told("events_waiting")),
            ("retry", _retry(policy)),
            ("kept for", duration(policy["retention_seconds"])),
        ]
    )
    # One that was set back to the defaults has a row, and no number.
    own = [kind for kind in substrate["kind_policies"] if any(kind[name] is not None for name in _NUMBERS)]
    if own:
        yield output.heading("Kinds with numbers of their own")
        yield output.fields((output.text(kind["job_kind"]), _own_numbers(kind)) for kind in own)
    if substrate["registrations"]:
        yield output.heading("Events that give jobs")
        yield output.table(
            ["event type", "kind", "executor", "priority", "state"],
            [
                (
                    output.text(one["event_type"]),
                    output.text(one["job_kind"]),
                    output.text(one["executor"]),
                    str(one["priority"]),
                    output.state("active" if one["active"] else "paused"),
                )
                for one in substrate["registrations"]
            ],
        )
    if substrate["decisions"]:
        yield output.heading("Who decided so, the last first")
        yield output.table(
            ["when", "by", "what", "how"],
            [
                (
                    output.time_cell(one["run_at"]),
                    output.text(one["actor"]),
                    output.text(one["command"].removeprefix("fn_job_")),
                    escaped(msgspec.json.encode(one["detail"]).decode()),
                )
                for one in substrate["decisions"]
            ],
        )


def _own_numbers(kind: Mapping[str, Any]) -> str:
    given = ((name.replace("_", " "), kind[name]) for name in _NUMBERS if kind[name] is not None)
    return ", ".join(f"{name} {output.text(value).removesuffix('.0')}" for name, value in given)


def _retry(policy: Mapping[str, Any]) -> str:
    delays = (
        f"{duration(policy['base_delay_seconds'])}, doubled up to {duration(policy['max_delay_seconds'])}"
    )
    return f"{policy['max_attempts']} attempts, delays of {delays}, jitter {policy['jitter']:g}"
