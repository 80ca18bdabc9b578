"""One scenario from beginning to end: bed, load, actions, quiet, checks; and the result as a value."""

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
from tests.faults.checks import broken_meanwhile, check
from tests.faults.plan import Action, Scenario
from tests.faults.surroundings import Missing
from tests.faults.verbs import HEALS, VERBS
from tests.support.certificates import Certificates
from webhookd.embedded.installation import Installation

# The load is on its way before anything is broken.
WARM_EVENTS = 100
# Only to end a run that hangs.
TIMEOUT_SECONDS = 900
# Of a fault that hit nothing.
TRIES = 5
TRY_INTERVAL_SECONDS = 0.2


@dataclass
class Result:
    """What became of a scenario."""

    scenario: str
    seed: int
    rounds: int
    major: int
    seconds: float = 0
    events: int = 0
    faults: int = 0
    effects: dict[str, int] = field(default_factory=dict)
    turned_away: dict[str, int] = field(default_factory=dict)
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


async def perform(
    scenario: Scenario, seed: int, installation: Installation, rounds: int | None = None
) -> Result:
    """Run it. Its logs are kept if it failed."""
    folder = Path(tempfile.mkdtemp(prefix="webhookd-faults-"))
    actions = scenario.actions(seed, rounds)
    (folder / "actions.txt").write_text("".join(f"{action}\n" for action in actions))
    result = Result(scenario.name, seed, rounds or scenario.rounds, installation.major)
    began = time.monotonic()
    try:
        async with (
            asyncio.timeout(TIMEOUT_SECONDS),
            open_bed(installation, scenario.needs, folder, Certificates.make(folder)) as bed,
        ):
            try:
                await under_load(bed, actions)
                await check(bed, scenario)
            finally:
                fill_in(result, bed)
    except Missing as missing:
        result.missing = str(missing)
    except Exception as error:  # whatever it is, the other scenarios go on
        (folder / "failure.txt").write_text(traceback.format_exc())
        text = str(error).strip().splitlines()[:1]
        result.problems.append(": ".join([type(error).__name__, *text]))
    result.seconds = time.monotonic() - began
    if result.passed:
        await asyncio.to_thread(shutil.rmtree, folder)
    else:
        result.folder = str(folder)
    return result


async def under_load(bed: Bed, actions: Sequence[Action]) -> None:
    """The actions one after the other, each written down when it begins."""
    with (bed.folder / "performed.txt").open("w", buffering=1) as performed:
        async with bed.watch.watching(), bed.publisher.publishing():
            await bed.publisher.accepted(WARM_EVENTS)
            began = time.monotonic()
            for action in actions:
                performed.write(f"{time.monotonic() - began:8.3f} {action}\n")
                await do(bed, action)
            performed.write(f"{time.monotonic() - began:8.3f} done\n")


async def do(bed: Bed, action: Action) -> None:
    """One action. A fault that hit nothing is none: it is done again, and is a problem if it never hits."""
    for _ in range(TRIES):
        hit = await VERBS[action.verb](bed, **action.arguments)
        if hit != 0:
            bed.effects["faults"] += action.is_fault
            break
        await asyncio.sleep(TRY_INTERVAL_SECONDS)
    else:
        bed.problems.append(f"{action} hit nothing, {TRIES} times")
    if action.verb in HEALS:
        bed.problems += await broken_meanwhile(bed)


def fill_in(result: Result, bed: Bed) -> None:
    """What is known, be it that the run ended early."""
    result.events = len(bed.publisher.accepted_events)
    effects = dict(bed.effects)
    result.faults = effects.pop("faults", 0)
    result.effects = {name: count for name, count in effects.items() if count}
    result.turned_away = dict(bed.publisher.rejections)
    result.recoveries = bed.recoveries
    result.idle_share = max(bed.idle_shares, default=None)
    with contextlib.suppress(ValueError):
        result.resident_mebibytes = bed.watch.most_resident_bytes >> 20
    result.problems += bed.problems
