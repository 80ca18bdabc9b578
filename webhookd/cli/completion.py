"""`webhookd completion`: the script that makes a shell complete our commands, options and their values."""

import click
from click.shell_completion import get_completion_class

from webhookd.cli.options import example

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "webhookd"
VARIABLE = "_WEBHOOKD_COMPLETE"


@click.command(
    "completion",
    epilog=example(
        "webhookd completion bash >> ~/.bashrc",
        "webhookd completion zsh >> ~/.zshrc",
        "webhookd completion fish > ~/.config/fish/completions/webhookd.fish",
    ),
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print a script that completes webhookd's commands in SHELL.

    Add it to what your shell reads at its start, and open a new one.
    """
    completion = get_completion_class(shell)
    if completion is None:
        raise click.UsageError(f"{shell} is not known")
    click.echo(completion(context.find_root().command, {}, PROGRAM, VARIABLE).source())
