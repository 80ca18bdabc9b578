"""The plans are pure, and every action has a verb."""

import inspect

import pytest

from tests.faults.plan import Action
from tests.faults.scenarios import ALL
from tests.faults.scenarios.support_actions import FAULTS
from tests.faults.verbs import VERBS

FULL = ALL["support_actions"].actions(1)


@pytest.mark.parametrize("name", ALL)
def test_same_seed_gives_same_actions(name: str) -> None:
    """The actions do not depend on plans made before."""
    first = ALL[name].actions(1)
    ALL[name].actions(2)
    assert ALL[name].actions(1) == first
    assert any(action.is_fault for action in first)


def test_different_seeds_give_different_actions() -> None:
    """The seed changes the plans of random scenarios."""
    assert all(ALL[name].actions(1) != ALL[name].actions(2) for name in ("kill", "backends", "mix"))


@pytest.mark.parametrize("name", ALL)
def test_every_action_has_a_verb(name: str) -> None:
    """Each action has a verb that takes exactly its arguments."""
    for action in ALL[name].actions(1):
        bound = inspect.signature(VERBS[action.verb]).bind(None, **action.arguments)
        assert len(bound.arguments) == 1 + len(action.arguments)


def test_every_action_of_support_has_every_fault() -> None:
    """Each verb of the API is used with each fault."""
    used = {(action.verb, action.arguments["how"]) for action in FULL if action.is_fault}
    verbs = {action.verb for action in FULL if "how" in action.arguments}
    assert len(verbs) == 9
    assert used == {(name, how) for name in verbs for how in FAULTS}


def test_action_as_text() -> None:
    """The action list of a failed run is readable."""
    assert str(Action("kill", {"instance": 1})) == "kill instance=1"


def test_full_run_has_at_least_500_faults() -> None:
    """Count the faults of all scenarios, each run once."""
    assert sum(action.is_fault for scenario in ALL.values() for action in scenario.actions(1)) >= 500
