"""How far a bench is: a bar where stderr is a terminal, else a line of stdout for each step, or nothing."""

import sys
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Course:
    """Its steps, in a `with`; nothing of the bar stays."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self._steps = steps
        self._step = 0
        self._quiet = quiet
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[step]}", style="dim"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=Console(stderr=True, markup=False, highlight=False),
            disable=not sys.stderr.isatty(),
            transient=True,
            # It takes from what is measured: seldom.
            refresh_per_second=5,
        )
        self._task: TaskID = self._bar.add_task("", step="", total=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, text: str, total: float | None = None) -> None:
        """Begin the next."""
        self._step += 1
        self.say(text, f"{self._step}/{self._steps}", total)

    def say(self, text: str, step: str = "", total: float | None = None) -> None:
        """Something beside the steps."""
        self._bar.start()
        self._bar.update(self._task, description=text, step=step, total=total, completed=0)
        if not self._quiet and not sys.stderr.isatty():
            click.echo(f"{step} {text}".strip())

    def pause(self) -> None:
        """Until the next step: somebody is asked."""
        self._bar.stop()

    def done(self, count: int) -> None:
        """So much of the step's total."""
        self._bar.update(self._task, completed=count)
