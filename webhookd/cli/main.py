"""The `webhookd` command: finds the subcommand, and reports an error as one line on stderr without traceback.

Exit codes: 0 success, 1 rejected or failed, 2 usage error, 69 daemon or database unavailable, 78 bad
configuration, 130 interrupted by Ctrl-C.
"""

import difflib
import pkgutil
import sys
from pathlib import Path

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from webhookd import __version__
from webhookd.cli.options import INTERRUPTED, example
from webhookd.core.errors import Refused, WebhookdError

# In the order of --help.
COMMANDS = {
    "demo": "webhookd.devtools.demo:command",
    "bench": "webhookd.devtools.bench:command",
    "serve": "webhookd.cli.server:serve",
    "listen": "webhookd.devtools.listen:command",
    "publish": "webhookd.deliveries.cli.publish:command",
    "migrate": "webhookd.cli.server:migrate",
    "check": "webhookd.cli.server:check",
    "status": "webhookd.cli.status:command",
    "console": "webhookd.console.cli:command",
    "tenants": "webhookd.deliveries.cli.tenants:command",
    "subscriptions": "webhookd.deliveries.cli.subscriptions:command",
    "events": "webhookd.deliveries.cli.events:command",
    "deliveries": "webhookd.deliveries.cli.deliveries:command",
    "dead-letters": "webhookd.deliveries.cli.dead_letters:command",
    "erasures": "webhookd.retention.cli:command",
    "retention": "webhookd.cli.retention:command",
    "jobs": "webhookd.jobqueue.cli.jobs:command",
    "token": "webhookd.cli.server:token",
}
SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
# `resume` for `remove` (0.67) is not close enough, `status` for `stauts` (0.83) is.
MIN_SIMILARITY = 0.75


class Commands(click.Group):
    """Imports a subcommand only when it is used, so that completing a word does not load the daemon."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = pkgutil.resolve_name(COMMANDS[cmd_name])
        _accept_config(command)
        return command


def _use_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.obj = path


def _accept_config(command: click.Command) -> None:
    """Add --config to a subcommand and to its own subcommands, so that it may also follow their names."""
    if not any(parameter.name == "config_path" for parameter in command.params):
        command.params.append(_config_option())
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _accept_config(inner)


def _config_option() -> click.Option:
    return click.Option(
        ["--config", "config_path"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        callback=_use_config,
        expose_value=False,
        help="The configuration file to use (default: $WEBHOOKD_CONFIG).",
    )


@click.group(
    cls=Commands, params=[_config_option()], context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="webhookd")
def commands() -> None:
    """Accept events and deliver them as signed HTTPS webhooks, reliably, with only PostgreSQL."""


@commands.command(
    "completion",
    epilog=example(
        "webhookd completion bash >> ~/.bashrc",
        "webhookd completion zsh >> ~/.zshrc",
        "webhookd completion fish > ~/.config/fish/completions/webhookd.fish",
    ),
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes webhookd's commands in SHELL.

    Add the script to your shell's startup file and open a new shell.
    """
    script = SHELLS[shell](context.find_root().command, {}, "webhookd", "_WEBHOOKD_COMPLETE").source()
    click.echo(script)


def _with_suggestions(error: click.UsageError) -> click.UsageError:
    """Suggest only close commands, and no hidden option: those exist to reject a secret as an argument."""
    context = error.ctx
    if context is None:
        return error
    if isinstance(error, click.NoSuchCommand) and isinstance(context.command, click.Group):
        names = context.command.list_commands(context)
        close = difflib.get_close_matches(error.command_name, names, n=1, cutoff=MIN_SIMILARITY)
        return click.NoSuchCommand(error.command_name, possibilities=close, ctx=context)
    if isinstance(error, click.NoSuchOption):
        visible = {
            name
            for parameter in context.command.get_params(context)
            if isinstance(parameter, click.Option) and not parameter.hidden
            for name in parameter.opts
        }
        close = [name for name in error.possibilities or () if name in visible]
        return click.NoSuchOption(error.option_name, possibilities=close, ctx=context)
    return error


def main() -> None:
    """Run the command line."""
    try:
        commands(standalone_mode=False, prog_name="webhookd")
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        message = _one_line(_with_suggestions(error).format_message())
        hint = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        _exit(f"{message}{hint}", error.exit_code)
    except click.ClickException as error:
        _exit(_one_line(error.format_message()), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except OSError as error:  # writing to stdout failed, for example because the disk is full
        _exit(error.strerror or str(error), 1)
    except WebhookdError as error:
        hint = f" ({error.hint})" if isinstance(error, Refused) and error.hint else ""
        _exit(f"{error}{hint}".replace("\n", " "), error.exit_code)


def _one_line(text: str) -> str:
    return " ".join(text.split())  # click lists choices on a line each


def _exit(message: str, code: int) -> None:
    click.echo(f"webhookd: {message}", err=True)
    sys.exit(code)
