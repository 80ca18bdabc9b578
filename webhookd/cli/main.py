"""`webhookd`: the commands, and what becomes of an error: one line on stderr, never a traceback.

Exit codes: 0 done, 1 refused or failed, 2 usage, 69 service or database unavailable, 78 bad
configuration, 130 Ctrl-C.
"""

import importlib
import sys
from pathlib import Path

import click

from webhookd import __version__
from webhookd.cli.options import INTERRUPTED
from webhookd.core.errors import Refused, WebhookdError

# In the order of --help. Each module has its click command in `command`.
COMMANDS = {
    "demo": "webhookd.devtools.demo",
    "bench": "webhookd.devtools.bench",
    "serve": "webhookd.cli.serve",
    "listen": "webhookd.devtools.listen",
    "publish": "webhookd.deliveries.cli.publish",
    "migrate": "webhookd.cli.migrate",
    "check": "webhookd.cli.check",
    "status": "webhookd.cli.status",
    "subscriptions": "webhookd.deliveries.cli.subscriptions",
    "deliveries": "webhookd.deliveries.cli.deliveries",
    "dead-letters": "webhookd.deliveries.cli.dead_letters",
    "jobs": "webhookd.jobqueue.cli.jobs",
    "token": "webhookd.cli.token",
    "completion": "webhookd.cli.completion",
}


class Commands(click.Group):
    """Imports a command when it is asked for: completing a word should not load a daemon."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  the base's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        return command if isinstance(command, click.Command) else None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="webhookd")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="The configuration file to use."
)
@click.pass_context
def commands(context: click.Context, config_path: Path | None) -> None:
    """Takes events and delivers them as signed HTTPS webhooks, durably, with PostgreSQL alone."""
    context.obj = config_path


def _proposing_what_is_shown(error: click.NoSuchOption) -> click.NoSuchOption:
    """Without hidden options, which are there to refuse what is given by them."""
    parameters = error.ctx.command.get_params(error.ctx) if error.ctx else []
    shown = {
        name
        for parameter in parameters
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in parameter.opts
    }
    close = [name for name in error.possibilities or () if name in shown]
    return click.NoSuchOption(error.option_name, possibilities=close, ctx=error.ctx)


def main() -> None:
    """Run the command line."""
    try:
        commands(standalone_mode=False, prog_name="webhookd")
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        told = _proposing_what_is_shown(error) if isinstance(error, click.NoSuchOption) else error
        context = told.ctx if isinstance(told, click.UsageError) else None
        hint = f" (see `{context.command_path} --help`)" if context else ""
        message = " ".join(told.format_message().split())  # click lists choices a line each
        click.echo(f"webhookd: {message}{hint}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except OSError as error:  # of standard output: a full disk. What else can fail has words of its own
        click.echo(f"webhookd: {error.strerror or error}", err=True)
        sys.exit(1)
    except WebhookdError as error:
        hint = f" ({error.hint})" if isinstance(error, Refused) and error.hint else ""
        click.echo(f"webhookd: {error}{hint}".replace("\n", " "), err=True)
        sys.exit(error.exit_code)
