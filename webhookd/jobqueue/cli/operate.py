"""`webhookd jobs status | enable | disable | configure | register`: the commands for operators.

Also the options that these commands share with jobs.py and work.py.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
import msgspec
from rich.console import RenderableType

from webhookd.cli import output
from webhookd.cli.client import Answer, Client, asks_daemon
from webhookd.cli.options import escaped, example, json_option, some_text
from webhookd.cli.output import count, duration
from webhookd.core import limits
from webhookd.jobqueue.fields import Executor

PATH = "/v1/job-substrate"
DEFAULT = "default"

priority_option = click.option(
    "--priority",
    type=click.IntRange(limits.MIN_PRIORITY, limits.MAX_PRIORITY),
    default=0,
    show_default=True,
    help="Jobs with a higher priority are claimed first.",
)


def executor_option(meaning: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option --executor, with this help text."""
    return click.option(
        "--executor",
        type=click.Choice([executor.value for executor in Executor]),
        default=Executor.EXTERNAL_WORKER.value,
        show_default=True,
        help=meaning,
    )


def show_line(answer: Answer, line: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """Print a response as JSON, or as a line made from it."""
    click.echo(answer.body if as_json else line(answer.value))


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


_SECONDS = _number(0, limits.MAX_JOB_DELAY_SECONDS)
_ATTEMPTS = _number(1, limits.MAX_ATTEMPTS, whole=True)
_RECOVERIES = _number(0, limits.MAX_LEASE_RECOVERIES, whole=True)
# Each setting of a policy: the type, the metavar and the help of its option.
_SETTINGS = {
    "max_attempts": (_ATTEMPTS, "N", "Maximum number of attempts, including the first."),
    "base_delay_seconds": (_SECONDS, "S", "First delay; doubles each time."),
    "max_delay_seconds": (_SECONDS, "S", "Longest delay before a retry."),
    "jitter": (_number(0, 1), "PART", "Random part of a delay that is added."),
    "max_lease_recoveries": (_RECOVERIES, "N", "Expired leases per attempt before it counts as a failure."),
    "retention_seconds": (_SECONDS, "S", "How long a finished job keeps its payload."),
}


def _settings_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, (kind, metavar, meaning) in reversed(_SETTINGS.items()):
        option = click.option(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=meaning)
        command = option(command)
    return command


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
@_settings_options
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

    def line(registration: dict[str, Any]) -> str:
        verb = "create" if registration["active"] else "no longer create"
        text = f"{escaped(event_type)} events {verb} {escaped(kind)} jobs for {registration['executor']}"
        return f"{text}, priority {registration['priority']}" if registration["priority"] else text

    show_line(answer, line, as_json=as_json)


COMMANDS = (status, enable, disable, configure, register)


def _switch(client: Client, *, enabled: bool, as_json: bool) -> None:
    show_line(
        client.patch(PATH, {"enabled": enabled}),
        lambda queue: f"job queue {'enabled' if queue['enabled'] else 'disabled'}",
        as_json=as_json,
    )


def _screen(answer: Answer) -> Iterator[RenderableType]:
    configuration = answer.value
    queue, policy = configuration["queue"], configuration["policy"]
    shown = ("active", "enabled") if configuration["enabled"] else ("paused", "disabled")
    yield output.line("job queue ", output.state(*shown))
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
    own = [(kind, text) for kind in configuration["kind_policies"] if (text := _kind_settings(kind))]
    if own:
        yield output.heading("Kinds with their own policy")
        yield output.fields((output.text(kind["job_kind"]), text) for kind, text in own)
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
    base, longest = duration(policy["base_delay_seconds"]), duration(policy["max_delay_seconds"])
    delays = f"delays of {base}, doubled up to {longest}"
    return f"{policy['max_attempts']} attempts, {delays}, jitter {policy['jitter']:g}"
