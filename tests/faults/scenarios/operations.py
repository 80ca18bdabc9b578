"""What operators do in a hurry: restarts one after the other, reloads by the dozen, files that are none."""

import asyncio
import copy
import time
from collections.abc import Callable
from random import Random

from tests.faults.bed import TOKEN, Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import heal, verb
from tests.flow.reload.test_bad_files import BROKEN
from tests.support.api import tokens
from tests.support.daemon import RELOADS

# P10: a token taken out of the configuration stops within this time of the reload.
TOKEN_SECONDS = 5.0
UNAUTHORIZED = 401
# Ways to spoil a file's text.
BAD_TEXTS: tuple[Callable[[str], str], ...] = (
    lambda good: good + "[retry\n",
    lambda good: good.replace("[retry]", "[retry]\nmax_attemps = 3"),
    lambda good: good[: len(good) // 2] + "\0",
)
STORM_SIGNALS = 20
# About as long as a reload takes: some files are read, and some are gone before.
STORM_INTERVAL_SECONDS = 0.02


@heal
async def restart_in_order(bed: Bed, *, instance: int) -> None:
    """SIGTERM, and start again when it has ended."""
    code = await bed.instances[instance].stop_in_order()
    if code != 0:
        bed.problems.append(f"instance {instance} ended with {code} at SIGTERM")
    bed.effects["restarts"] += 1
    await bed.instances[instance].start()


@verb
async def reload_bad_file(bed: Bed, *, instance: int, how: str) -> None:
    """A file that cannot be used is refused, and the good one is put back."""
    daemon = bed.instances[instance].daemon
    good = copy.deepcopy(daemon._sections)
    spoil, _ = BROKEN[how]
    spoil(daemon)
    if await daemon.reload():
        bed.problems.append(f"a file with {how} was taken")
    bed.effects["files_refused"] += 1
    if daemon.config_path.is_dir():
        daemon.config_path.rmdir()
    daemon._sections = good
    daemon.configure()


@verb
async def sighups(bed: Bed, *, instance: int, count: int) -> None:
    """Many at once, with a good file; it ends by having read it."""
    daemon = bed.instances[instance].daemon
    before = daemon.metric(RELOADS)
    for _ in range(count):
        daemon.sighup()
    await daemon.until(lambda: daemon.metric(RELOADS) > before, "reloaded")
    bed.effects["signals"] += count


@verb
async def storm(bed: Bed, *, instance: int, signals: int, max_attempts: int) -> int:
    """Signals while the file flips between bad and good; the last, which changes something, must be taken.

    How many reloads were refused.
    """
    daemon = bed.instances[instance].daemon
    before = daemon.metric(RELOADS, outcome="refused")
    good = daemon.config_path.read_text()
    for number in range(signals):
        spoil = BAD_TEXTS[number // 2 % len(BAD_TEXTS)]
        daemon.put(good if number % 2 else spoil(good))
        daemon.sighup()
        await asyncio.sleep(STORM_INTERVAL_SECONDS)
    daemon.configure(retry={"max_attempts": max_attempts})
    daemon.sighup()
    await daemon.until(lambda: daemon.get_json("/status")["retry"]["max_attempts"] == max_attempts, "taken")
    refused = int(daemon.metric(RELOADS, outcome="refused") - before)
    bed.effects["signals"] += signals
    bed.effects["files_refused_in_storms"] += refused
    return refused


@verb
async def take_token_away(bed: Bed, *, instance: int) -> None:
    """How long a token is still good that is not in the file any more."""
    daemon = bed.instances[instance].daemon
    given = tokens({TOKEN: ["ingest", "read"], "leaked": ["read"]})
    daemon.configure(api={"tokens": given})
    await daemon.reload()
    kept, daemon.token = daemon.token, "leaked"
    assert daemon.get("/status")[0] == 200, "the token is not good"
    daemon.configure(api={"tokens": given[:1]})
    began = time.monotonic()
    daemon.sighup()
    await daemon.until(lambda: daemon.get("/status")[0] == UNAUTHORIZED, "refused")
    bed.recovered("a token taken out of the file: refused", began, TOKEN_SECONDS)
    daemon.token = kept


def restarting(random: Random, rounds: int) -> list[Action]:
    """One after the other, round after round."""
    actions: list[Action] = []
    for _ in range(rounds):
        for instance in range(3):
            actions += [
                fault("restart_in_order", instance=instance),
                act("accepted", more=random.randint(30, 120)),
            ]
    return actions


def reloading(random: Random, rounds: int) -> list[Action]:
    """Every bad file, good ones by the dozen, storms of both, and tokens taken away."""
    actions: list[Action] = []
    for _ in range(rounds):
        for how in random.sample(list(BROKEN), len(BROKEN)):
            actions += [
                fault("reload_bad_file", instance=random.randrange(3), how=how),
                act("accepted", more=random.randint(5, 30)),
            ]
        for instance in range(3):
            actions += [
                fault("sighups", instance=instance, count=random.randint(5, 30)),
                fault(
                    "storm",
                    instance=instance,
                    signals=STORM_SIGNALS,
                    max_attempts=random.randint(500, 999),
                ),
                fault("take_token_away", instance=instance),
                act("accepted", more=random.randint(5, 30)),
            ]
    return actions


SCENARIOS = (
    Scenario(
        "rolling_restarts",
        "every instance restarted in order, one after the other, round after round",
        "no lease is left behind, and nothing is sent twice",
        restarting,
        effects=("restarts",),
        forbidden=("leases_expired", "requests_doubled"),
        rounds=5,
    ),
    Scenario(
        "reloads",
        "SIGHUP by the dozen, with every kind of bad file; tokens taken away",
        "a bad file changes nothing; a token that is gone is refused within five seconds",
        reloading,
        effects=("files_refused", "files_refused_in_storms", "signals"),
        forbidden=("leases_expired", "requests_doubled"),
        may_log=("configuration not reloaded",),
        rounds=2,
        needs=Needs(tokens=True),
    ),
)
