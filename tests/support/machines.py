"""How Hypothesis drives a machine over one database: functions as they are, or one of them broken."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.database import Cluster, Database
from tests.support.guards import Weakened

People = TypeVar("People")

# A search that ends when it finds. Most mistakes are found by the tenth example, but of 36 searches for the
# rarest one took 140; and they differ although derandomized: Hypothesis draws some values from the constants
# of whatever modules are loaded, so a search alone is another than one within all tests.
ENOUGH_TO_FIND = 1000


@dataclass(frozen=True)
class Drive(Generic[People]):
    """A machine, and the people that it works with: sessions of a database that serves all examples."""

    machine: Callable[[asyncio.Runner, People], RuleBasedStateMachine]
    people: Callable[[Database], Awaitable[People]]
    steps: int

    def go(self, cluster: Cluster, mistake: Weakened | None = None, **chosen: Any) -> None:
        """Let Hypothesis look for an order of steps that is not as the model says."""

        async def prepare(database: Database) -> People:
            people = await self.people(database)
            if mistake is not None:
                await mistake.take_away(await database.connect("superuser"))
            return people

        with asyncio.Runner() as runner:
            database = runner.run(cluster.create_database(migrated=True))
            try:
                people = runner.run(prepare(database))
                run_state_machine_as_test(
                    # Whatever makes one will do, by Hypothesis's word, if not by its types.
                    cast("type[RuleBasedStateMachine]", partial(self.machine, runner, people)),
                    # The first example with a database is slow, and a machine's are large: no fault.
                    settings=settings(
                        stateful_step_count=self.steps, suppress_health_check=list(HealthCheck), **chosen
                    ),
                )
            finally:
                runner.run(cluster.drop_database(database))

    def finds(self, cluster: Cluster, mistake: Weakened) -> None:
        """Fail unless one is found. The first is enough: it need not be made small."""
        # A KeyError: the answer has not what an answer of its kind has.
        with pytest.raises((AssertionError, KeyError, asyncpg.PostgresError)) as found:
            self.go(
                cluster,
                mistake,
                max_examples=ENOUGH_TO_FIND,
                derandomize=True,
                phases=[Phase.generate],
                database=None,
            )
        assert not isinstance(found.value, asyncpg.PostgresSyntaxError)
