"""The plans: pure, complete, and of known words only."""

import inspect

import pytest

from tests.faults.plan import Action
from tests.faults.scenarios import ALL
from tests.faults.verbs import VERBS


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_actions(name: str) -> None:
    """Whatever else was drawn before; and another seed may give others."""
    first = ALL[name].actions(1)
    ALL[name].actions(2)
    assert ALL[name].actions(1) == first
    assert any(action.is_fault for action in first)


def test_seeds_differ() -> None:
    """A seed means something."""
    assert all(ALL[name].actions(1) != ALL[name].actions(2) for name in ("kill", "backends", "mix"))


@pytest.mark.parametrize("name", ALL)
def test_every_action_can_be_performed(name: str) -> None:
    """Each has a verb that takes exactly what it is told."""
    for action in ALL[name].actions(1):
        bound = inspect.signature(VERBS[action.verb]).bind(None, **action.arguments)
        assert len(bound.arguments) == 1 + len(action.arguments)


def test_an_action_reads_as_it_is_told() -> None:
    """What a failing run leaves behind can be read by a person."""
    assert str(Action("kill", {"instance": 1})) == "kill instance=1"


def test_a_run_has_enough_faults() -> None:
    """All scenarios once: at least five hundred."""
    assert sum(action.is_fault for scenario in ALL.values() for action in scenario.actions(1)) >= 500
