"""What a scenario does, as values: a list of actions that is a pure function of its name, seed and rounds.

Knows no process and no clock. `perform` in performance.py gives each action to the verb of its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

Argument: TypeAlias = int | float | str


@dataclass(frozen=True)
class Action:
    """A verb and what it is told. Faults are counted; the rest lets time pass, looks, or heals."""

    verb: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    is_fault: bool = False

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.arguments.items()]
        return " ".join([self.verb, *words])


def act(verb: str, **arguments: Argument) -> Action:
    """What is no fault."""
    return Action(verb, arguments)


def fault(verb: str, **arguments: Argument) -> Action:
    """One fault injected."""
    return Action(verb, arguments, is_fault=True)


Plan: TypeAlias = Callable[[Random, int], list[Action]]


@dataclass(frozen=True)
class Needs:
    """How the bed of a scenario differs from the usual: three instances, and a wire before each."""

    instances: int = 3
    standby: bool = False
    small_disk: str = ""  # "heap" or "wal"
    names: bool = False
    failpoints: bool = False
    wrong_clock: bool = False
    bad_endpoints: bool = False
    tokens: bool = False
    # Of the daemon's configuration, "section.key": value.
    settings: Mapping[str, object] = field(default_factory=dict)
    # Of PostgreSQL's.
    server_settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """One way to break things. Without one of its effects it has shown nothing, and fails."""

    name: str
    breaks: str
    holds: str  # beyond the invariants
    plan: Plan
    effects: tuple[str, ...]
    rounds: int
    needs: Needs = Needs()
    # Effects that must not be seen at all: a restart in order doubles nothing.
    forbidden: tuple[str, ...] = ()
    # What the daemon may log as an error of its own, by a piece of its message.
    may_log: tuple[str, ...] = ()

    def actions(self, seed: int, rounds: int | None = None) -> list[Action]:
        """The same for the same seed, on every machine."""
        return self.plan(Random(f"{self.name} {seed}"), rounds or self.rounds)  # noqa: S311  no secret
