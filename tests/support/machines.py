"""Runs a Hypothesis state machine on one database, with correct functions or with one planted mistake."""

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

Sessions = TypeVar("Sessions")

# A search ends at the first find. Most mistakes are found by the tenth example; one of 36 searches for the
# rarest mistake took 140. Derandomized searches still differ: Hypothesis draws some values from the constants
# of all loaded modules, so a test alone searches differently than in a full run.
ENOUGH_TO_FIND = 1000


@dataclass(frozen=True)
class Drive(Generic[Sessions]):
    """A state machine and the sessions that it uses, on one database for all examples."""

    machine: Callable[[asyncio.Runner, Sessions], RuleBasedStateMachine]
    open_sessions: Callable[[Database], Awaitable[Sessions]]
    steps: int

    def go(self, cluster: Cluster, mistake: Weakened | None = None, **chosen: Any) -> None:
        """Let Hypothesis search for an order of steps whose result differs from the model."""

        async def prepare(database: Database) -> Sessions:
            sessions = await self.open_sessions(database)
            if mistake is not None:
                await mistake.take_away(await database.connect("superuser"))
            return sessions

        with asyncio.Runner() as runner:
            database = runner.run(cluster.create_database(migrated=True))
            try:
                sessions = runner.run(prepare(database))
                run_state_machine_as_test(
                    # Hypothesis accepts any factory, although its types say a class.
                    cast("type[RuleBasedStateMachine]", partial(self.machine, runner, sessions)),
                    # The first example with a database is slow, and examples of a machine are large.
                    settings=settings(
                        stateful_step_count=self.steps, suppress_health_check=list(HealthCheck), **chosen
                    ),
                )
            finally:
                runner.run(cluster.drop_database(database))

    def finds(self, cluster: Cluster, mistake: Weakened) -> None:
        """Fail unless the search finds the mistake. It need not be minimized."""
        # KeyError: an answer lacks an expected field.
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
