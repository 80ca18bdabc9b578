"""What all commands have in common: examples, usage errors, --config, suggestions, completion."""

import click
import pytest

from tests.support.shell import Shell
from webhookd.cli.main import commands

WITH_EXAMPLE = (
    "bench",
    "status",
    "publish",
    "subscriptions",
    "deliveries",
    "dead-letters",
    "token",
    "completion",
)


def every_command() -> list[list[str]]:
    """The words of each of these commands and their subcommands."""
    context = click.Context(commands)
    found = []
    for name in WITH_EXAMPLE:
        command = commands.get_command(context, name)
        if isinstance(command, click.Group):
            found += [[name, inner] for inner in command.list_commands(context)]
        else:
            found.append([name])
    return found


def test_every_command_has_an_example() -> None:
    """The example contains the command itself."""
    for words in every_command():
        command: click.Command | None = commands
        for word in words:
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), word)
        assert command is not None
        assert f"webhookd {' '.join(words)}" in (command.epilog or ""), words


@pytest.mark.parametrize(
    "words",
    [
        ["statuss"],
        ["status", "--wat"],
        ["subscriptions", "delete"],
        ["deliveries", "show"],
        ["deliveries", "show", "1", "--event", "1"],
        ["deliveries", "show", "-1"],
        ["deliveries", "show", "--", "-1"],
        ["deliveries", "show", "1; select 1"],
        ["deliveries", "show", "../../status"],
        ["deliveries", "show", "9" * 30],
        ["deliveries", "show", "²"],
        ["deliveries", "list", "--status", "Lost"],
        ["deliveries", "list", "--limit", "0"],
        ["dead-letters", "requeue"],
        ["dead-letters", "requeue", "1", "--all"],
        ["dead-letters", "requeue", "--all", "--error-code", "TIMEOUT"],
        ["dead-letters", "list", "--failed-after", "yesterday"],
        ["dead-letters", "list", "--failed-after", "2026-01-01T00:00:00"],
        ["publish", "a", "1", "--batch", "-"],
        ["bench", "--events", "1"],
        ["bench", "--seconds", "0"],
        ["completion", "tcsh"],
    ],
    ids=" ".join,
)
async def test_usage_error_is_one_line(lonely: Shell, words: list[str]) -> None:
    """Exit 2, without a request to the daemon."""
    ran = await lonely.run(*words)
    assert (ran.exit_code, ran.out) == (2, "")
    assert "--help`" in ran.error


async def test_hidden_option_is_not_suggested(lonely: Shell) -> None:
    """Hidden options only exist to reject a secret as an argument."""
    for words, suggested in (
        (("status", "--tokn"), "'--token-file'"),
        (("listen", "--secrt"), ""),
        (("status", "--hepl"), "'--help'"),
    ):
        ran = await lonely.run(*words, "x")
        assert ran.exit_code == 2
        assert suggested in ran.error
        assert "'--token'" not in ran.error
        assert "'--secret'" not in ran.error


async def test_shells_complete_commands_options_and_values(lonely: Shell) -> None:
    """The script of each shell is printed, and the requests that it makes are answered."""
    for shell in ("bash", "zsh", "fish"):
        assert "_WEBHOOKD_COMPLETE" in (await lonely.done("completion", shell)).out
    for typed, words in (
        (["de"], {"deliveries", "dead-letters"}),
        (["token", "x", "--scope", "i"], {"ingest"}),
        (["deliveries", "list", "--status", "P"], {"Pending", "PendingRetry"}),
    ):
        asking = lonely.having(
            _WEBHOOKD_COMPLETE="bash_complete",
            COMP_WORDS=" ".join(["webhookd", *typed]),
            COMP_CWORD=str(len(typed)),
        )
        answered = {line.partition(",")[2] for line in (await asking.done()).out.splitlines()}
        assert words <= answered, typed


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (["stauts"], "Did you mean 'status'?"),
        (["dead-leters"], "Did you mean 'dead-letters'?"),
        (["subscriptions", "craete"], "Did you mean 'create'?"),
        (["subscriptions", "remove"], None),
        (["zzz"], None),
    ],
)
async def test_unknown_command_suggests_only_a_close_one(
    lonely: Shell, words: list[str], suggested: str | None
) -> None:
    """`resume` resembles `remove`, but means something else."""
    ran = await lonely.run(*words)
    assert ran.exit_code == 2
    assert suggested in ran.error if suggested else "Did you mean" not in ran.error


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "{}", "status"],
        ["status", "--config", "{}"],
        ["deliveries", "--config", "{}", "list"],
        ["deliveries", "list", "--config={}"],
        ["check", "--config", "{}"],
        ["jobs", "work", "--config", "{}", "--kind", "a", "--", "true", "--config", "elsewhere"],
    ],
    ids=" ".join,
)
async def test_config_is_accepted_before_and_after_the_subcommand(lonely: Shell, words: list[str]) -> None:
    """The command reads the named file, and reports the mistake in it: exit 78."""
    file = lonely.folder / "mine.toml"
    file.write_text("[databse]\n")
    ran = await lonely.having(WEBHOOKD_URL="").run(*(word.format(file) for word in words))
    assert (ran.exit_code, f"{file}: unknown section [databse]" in ran.error) == (78, True), ran


async def test_unknown_variable_is_rejected_where_settings_are_loaded(lonely: Shell) -> None:
    """`serve` would otherwise start an embedded database; with --url a command loads no settings."""
    cli = lonely.having(WEBHOOKD_DB_DSN="postgresql://db", WEBHOOKD_URL="")
    for words in (["serve"], ["check"], ["migrate"], ["status"], ["listen"]):
        ran = await cli.run(*words)
        assert (ran.exit_code, "did you mean WEBHOOKD_DATABASE_DSN?" in ran.error) == (78, True), ran
    assert (await cli.run("status", "--url", "http://127.0.0.1:1")).exit_code == 69
