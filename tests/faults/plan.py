"""Actions and scenarios as values: the actions are a pure function of the scenario's name, seed and rounds.

Knows no process and no clock. runner.py passes each action to the verb of the same name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

Argument: TypeAlias = int | float | str


@dataclass(frozen=True)
class Action:
    """A verb and its arguments. Faults are counted; other actions wait, check or repair."""

    verb: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    is_fault: bool = False

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.arguments.items()]
        return " ".join([self.verb, *words])


def act(verb: str, **arguments: Argument) -> Action:
    """Create an action that is not a fault."""
    return Action(verb, arguments)


def fault(verb: str, **arguments: Argument) -> Action:
    """Create an action that injects one fault."""
    return Action(verb, arguments, is_fault=True)


Plan: TypeAlias = Callable[[Random, int], list[Action]]


@dataclass(frozen=True)
class Needs:
    """How a scenario's test bed differs from the default: three instances with a proxy before each."""

    instances: int = 3
    standby: bool = False
    small_disk: str = ""  # "heap" or "wal"
    names: bool = False
    failpoints: bool = False
    wrong_clock: bool = False
    bad_endpoints: bool = False
    tokens: bool = False
    # Settings of the daemon, "section.key": value.
    settings: Mapping[str, object] = field(default_factory=dict)
    # Settings of PostgreSQL.
    server_settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """One kind of fault. The scenario fails if one of its effects was not seen: then it proved nothing."""

    name: str
    breaks: str
    holds: str  # in addition to the invariants
    plan: Plan
    effects: tuple[str, ...]
    rounds: int
    needs: Needs = Needs()
    # Effects that must not be seen: a graceful restart, for example, sends nothing twice.
    forbidden: tuple[str, ...] = ()
    # Parts of messages that the daemon may log at level "error".
    may_log: tuple[str, ...] = ()

    def actions(self, seed: int, rounds: int | None = None) -> list[Action]:
        """Return the actions, which are the same for the same seed on every machine."""
        return self.plan(Random(f"{self.name} {seed}"), rounds or self.rounds)  # noqa: S311  no secret
