"""Runs one scenario: opens the test bed, starts the load, runs the actions and checks; returns a Result."""

import asyncio
import contextlib
import dataclasses
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.bed import Bed, Recovery, open_bed
from tests.faults.checks import broken_under_load, check
from tests.faults.plan import Action, Scenario
from tests.faults.servers import MissingRequirement
from tests.faults.verbs import HEALS, VERBS
from tests.support.certificates import Certificates
from webhookd.embedded.installation import Installation

# Events accepted before the first fault, so that the load is running.
WARM_UP_EVENTS = 100
# Only ends a run that hangs.
TIMEOUT_SECONDS = 900
# A fault that had no effect is repeated.
TRIES = 5
TRY_INTERVAL_SECONDS = 0.2


@dataclass
class Result:
    """The outcome of a scenario."""

    scenario: str
    seed: int
    rounds: int
    major: int
    seconds: float = 0
    events: int = 0
    faults: int = 0
    effects: dict[str, int] = field(default_factory=dict)
    failed_publishes: dict[str, int] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    idle_share: float | None = None
    resident_mebibytes: int = 0
    problems: list[str] = field(default_factory=list)
    missing: str | None = None
    folder: str | None = None

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


async def run_scenario(
    scenario: Scenario, seed: int, installation: Installation, rounds: int | None = None
) -> Result:
    """Run a scenario. The folder with its logs is kept if it failed."""
    folder = Path(tempfile.mkdtemp(prefix="webhookd-faults-"))
    actions = scenario.actions(seed, rounds)
    (folder / "actions.txt").write_text("".join(f"{action}\n" for action in actions))
    result = Result(scenario.name, seed, rounds or scenario.rounds, installation.major)
    started = time.monotonic()
    try:
        async with (
            asyncio.timeout(TIMEOUT_SECONDS),
            open_bed(installation, scenario.needs, folder, Certificates.make(folder)) as bed,
        ):
            try:
                await run_under_load(bed, actions)
                await check(bed, scenario)
            finally:
                fill_in(result, bed)
    except MissingRequirement as missing:
        result.missing = str(missing)
    except Exception as error:  # the other scenarios must still run
        (folder / "failure.txt").write_text(traceback.format_exc())
        text = str(error).strip().splitlines()[:1]
        result.problems.append(": ".join([type(error).__name__, *text]))
    result.seconds = time.monotonic() - started
    if result.passed:
        await asyncio.to_thread(shutil.rmtree, folder)
    else:
        result.folder = str(folder)
    return result


async def run_under_load(bed: Bed, actions: Sequence[Action]) -> None:
    """Run the actions one at a time, and log when each starts."""
    with (bed.folder / "performed.txt").open("w", buffering=1) as performed:
        async with bed.watch.watching(), bed.publisher.publishing():
            await bed.publisher.accepted(WARM_UP_EVENTS)
            started = time.monotonic()
            for action in actions:
                performed.write(f"{time.monotonic() - started:8.3f} {action}\n")
                await run_action(bed, action)
            performed.write(f"{time.monotonic() - started:8.3f} done\n")


async def run_action(bed: Bed, action: Action) -> None:
    """Run one action. A fault without effect is repeated, not counted, and a problem after the last try."""
    for _ in range(TRIES):
        affected = await VERBS[action.verb](bed, **action.arguments)
        if affected != 0:
            bed.effects["faults"] += action.is_fault
            break
        await asyncio.sleep(TRY_INTERVAL_SECONDS)
    else:
        bed.problems.append(f"{action} had no effect in {TRIES} tries")
    if action.verb in HEALS:
        bed.problems += await broken_under_load(bed)


def fill_in(result: Result, bed: Bed) -> None:
    """Copy what is known from the test bed, even if the run ended early."""
    result.events = len(bed.publisher.accepted_events)
    effects = dict(bed.effects)
    result.faults = effects.pop("faults", 0)
    result.effects = {name: count for name, count in effects.items() if count}
    result.failed_publishes = dict(bed.publisher.rejections)
    result.recoveries = bed.recoveries
    result.idle_share = max(bed.idle_shares, default=None)
    with contextlib.suppress(ValueError):
        result.resident_mebibytes = bed.watch.max_resident_bytes >> 20
    result.problems += bed.problems
