"""`webhookd jobs status | enable | disable | configure | register`: the commands for operators."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
import msgspec
from rich.console import RenderableType

from webhookd.cli import output
from webhookd.cli.client import Answer, Client, asks_daemon
from webhookd.cli.options import escaped, example, json_option, some_text
from webhookd.cli.output import count, duration
from webhookd.core.limits import MAX_ATTEMPTS, MAX_JOB_DELAY_SECONDS, MAX_LEASE_RECOVERIES
from webhookd.jobqueue.cli.options import executor_option, priority_option

PATH = "/v1/job-substrate"
DEFAULT = "default"
_SETTINGS = (
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
    """Show whether the job queue is enabled, its counts, policies and registrations."""
    output.show_answer(client.get(PATH), _screen, as_json=as_json)


@click.command("enable", epilog=example("webhookd jobs enable"))
@json_option
@asks_daemon
def enable(client: Client, *, as_json: bool) -> None:
    """Enable the job queue, for all instances and for executors that use SQL."""
    _switch(client, enabled=True, as_json=as_json)


@click.command("disable", epilog=example("webhookd jobs disable"))
@json_option
@asks_daemon
def disable(client: Client, *, as_json: bool) -> None:
    """Disable the job queue: no job is enqueued or claimed. Running jobs can still finish."""
    _switch(client, enabled=False, as_json=as_json)


def _number(lowest: int, highest: int, *, whole: bool = False) -> Callable[[str], float | str]:
    """The same bounds as fn_job_configure, with a message for a person."""

    def parsed(text: str) -> float | str:
        if text == DEFAULT:
            return text
        try:
            value = float(text)
        except ValueError as error:
            raise click.BadParameter(f"{escaped(text)} is not a number") from error
        if not lowest <= value <= highest or (whole and not value.is_integer()):
            kind = "whole number" if whole else "number"
            raise click.BadParameter(f"must be a {kind} from {lowest} to {highest}")
        # An integer column does not accept 3.0.
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
    help="Change the policy of this kind only. The value `default` restores the default policy.",
)
@click.option(
    "--max-attempts",
    type=_number(1, MAX_ATTEMPTS, whole=True),
    metavar="N",
    help="Maximum number of attempts, including the first.",
)
@click.option(
    "--base-delay-seconds",
    type=_SECONDS,
    metavar="S",
    help="First delay; doubles each time.",
)
@click.option("--max-delay-seconds", type=_SECONDS, metavar="S", help="Longest delay before a retry.")
@click.option(
    "--jitter",
    type=_number(0, 1),
    metavar="PART",
    help="Random part of a delay that is added.",
)
@click.option(
    "--max-lease-recoveries",
    type=_number(0, MAX_LEASE_RECOVERIES, whole=True),
    metavar="N",
    help="Expired leases per attempt before it counts as a failure.",
)
@click.option(
    "--retention-seconds", type=_SECONDS, metavar="S", help="How long a finished job keeps its payload."
)
@json_option
@asks_daemon
def configure(client: Client, *, kind: str | None, as_json: bool, **numbers: float | str | None) -> None:
    """Change the retry and retention policy, which is stored in the database and shared by all instances.

    An instance writes the settings in [jobs] of its configuration file again when it starts.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    if not given:
        raise click.UsageError("give at least one setting to change")
    if kind is None and DEFAULT in given.values():
        raise click.UsageError(f"the value {DEFAULT} needs --kind")
    change: dict[str, object] = {n: None if value == DEFAULT else value for n, value in given.items()}
    body = {"policy": change} if kind is None else {"kind_policy": change | {"job_kind": kind}}
    output.show_answer(client.patch(PATH, body), _screen, as_json=as_json)


@click.command(
    "register",
    epilog=example(
        "webhookd jobs register order.created invoice.make --priority 5",
        "webhookd jobs register order.created invoice.make --off",
    ),
)
@click.argument("event_type", type=some_text)
@click.argument("kind", type=some_text)
@executor_option("Executor of the jobs.")
@priority_option
@click.option("--off", is_flag=True, help="Deactivate the registration; nothing else changes.")
@json_option
@asks_daemon
def register(
    client: Client, *, event_type: str, kind: str, executor: str, priority: int, off: bool, as_json: bool
) -> None:
    """Create one job of KIND for each event of EVENT_TYPE, from now on.

    An existing registration gets the given executor and priority, or their defaults.
    """
    names = {"event_type": event_type, "job_kind": kind}
    change = {"active": False} if off else {"executor": executor, "priority": priority}
    answer = client.post("/v1/job-registrations", names | change)
    if as_json:
        output.show_json(answer.body)
    else:
        registration = answer.value
        verb = "create" if registration["active"] else "no longer create"
        text = f"{escaped(event_type)} events {verb} {escaped(kind)} jobs for {registration['executor']}"
        suffix = f", priority {registration['priority']}" if registration["priority"] else ""
        click.echo(f"{text}{suffix}")


COMMANDS = (status, enable, disable, configure, register)


def _switch(client: Client, *, enabled: bool, as_json: bool) -> None:
    answer = client.patch(PATH, {"enabled": enabled})
    if as_json:
        output.show_json(answer.body)
    else:
        click.echo(f"job queue {'enabled' if answer.value['enabled'] else 'disabled'}")


def _screen(answer: Answer) -> Iterator[RenderableType]:
    configuration = answer.value
    queue, policy = configuration["queue"], configuration["policy"]
    enabled = configuration["enabled"]
    yield output.line(
        "job queue ", output.state("active", "enabled") if enabled else output.state("paused", "disabled")
    )
    age = queue["oldest_queued_age_s"]
    oldest = "" if age is None else f", oldest waiting for {duration(max(0.0, age))}"

    def counted(name: str) -> str:
        return count(queue[name], queue["counted_up_to"])

    yield output.fields(
        [
            ("queued", f"{counted('backlog')}{oldest}"),
            ("scheduled for later", counted("scheduled")),
            ("in progress", f"{counted('in_progress')}, {counted('lease_active')} with an active lease"),
            ("waiting for retry", counted("retry_waiting")),
            ("dead letters", counted("dead_letter_open")),
            ("events waiting", counted("events_waiting")),
            ("retry", _retry(policy)),
            ("retention", duration(policy["retention_seconds"])),
        ]
    )
    # A kind that was reset to the defaults has a row without values.
    own = [
        kind for kind in configuration["kind_policies"] if any(kind[name] is not None for name in _SETTINGS)
    ]
    if own:
        yield output.heading("Kinds with their own policy")
        yield output.fields((output.text(kind["job_kind"]), _kind_settings(kind)) for kind in own)
    if configuration["registrations"]:
        yield output.heading("Events that create jobs")
        yield output.table(
            ["event type", "kind", "executor", "priority", "state"],
            [
                (
                    output.text(row["event_type"]),
                    output.text(row["job_kind"]),
                    output.text(row["executor"]),
                    str(row["priority"]),
                    output.state("active" if row["active"] else "paused"),
                )
                for row in configuration["registrations"]
            ],
        )
    if configuration["decisions"]:
        yield output.heading("Last changes")
        yield output.table(
            ["time", "actor", "command", "detail"],
            [
                (
                    output.time_cell(row["run_at"]),
                    output.text(row["actor"]),
                    output.text(row["command"].removeprefix("fn_job_")),
                    escaped(msgspec.json.encode(row["detail"]).decode()),
                )
                for row in configuration["decisions"]
            ],
        )


def _kind_settings(kind: Mapping[str, Any]) -> str:
    given = ((name.replace("_", " "), kind[name]) for name in _SETTINGS if kind[name] is not None)
    return ", ".join(f"{name} {output.text(value).removesuffix('.0')}" for name, value in given)


def _retry(policy: Mapping[str, Any]) -> str:
    delays = (
        f"{duration(policy['base_delay_seconds'])}, doubled up to {duration(policy['max_delay_seconds'])}"
    )
    return f"{policy['max_attempts']} attempts, delays of {delays}, jitter {policy['jitter']:g}"
