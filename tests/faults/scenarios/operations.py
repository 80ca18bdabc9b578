"""Operations: rolling restarts, many reloads at once, invalid configuration files, removed tokens."""

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

# P10: a removed token is rejected within this time after the reload.
TOKEN_SECONDS = 5.0
UNAUTHORIZED = 401
# Ways to break the text of a file.
BAD_TEXTS: tuple[Callable[[str], str], ...] = (
    lambda good: good + "[retry\n",
    lambda good: good.replace("[retry]", "[retry]\nmax_attemps = 3"),
    lambda good: good[: len(good) // 2] + "\0",
)
STORM_SIGNALS = 20
# About as long as a reload takes: some files are replaced before they are read.
STORM_INTERVAL_SECONDS = 0.02


@heal
async def restart_gracefully(bed: Bed, *, instance: int) -> None:
    """Send SIGTERM, and start the instance again when it has stopped."""
    code = await bed.instances[instance].stop_gracefully()
    if code != 0:
        bed.problems.append(f"instance {instance}: exit code {code} after SIGTERM")
    bed.effects["restarts"] += 1
    await bed.instances[instance].start()


@verb
async def reload_bad_file(bed: Bed, *, instance: int, how: str) -> None:
    """Reload an invalid file, which must be rejected; then restore the valid file."""
    daemon = bed.instances[instance].daemon
    good = copy.deepcopy(daemon._sections)
    break_file, _ = BROKEN[how]
    break_file(daemon)
    if await daemon.reload():
        bed.problems.append(f"an invalid file was accepted: {how}")
    bed.effects["files_rejected"] += 1
    if daemon.config_path.is_dir():
        daemon.config_path.rmdir()
    daemon._sections = good
    daemon.configure()


@verb
async def send_sighups(bed: Bed, *, instance: int, count: int) -> None:
    """Send many signals at once with a valid file, and wait for a reload."""
    daemon = bed.instances[instance].daemon
    before = daemon.metric(RELOADS)
    for _ in range(count):
        daemon.sighup()
    await daemon.until(lambda: daemon.metric(RELOADS) > before, "reloaded")
    bed.effects["signals"] += count


@verb
async def reload_storm(bed: Bed, *, instance: int, signals: int, max_attempts: int) -> int:
    """Send signals while the file alternates between invalid and valid; the last change must be applied.

    Returns how many reloads were rejected.
    """
    daemon = bed.instances[instance].daemon
    before = daemon.metric(RELOADS, outcome="refused")
    good = daemon.config_path.read_text()
    for number in range(signals):
        break_text = BAD_TEXTS[number // 2 % len(BAD_TEXTS)]
        daemon.put(good if number % 2 else break_text(good))
        daemon.sighup()
        await asyncio.sleep(STORM_INTERVAL_SECONDS)
    daemon.configure(retry={"max_attempts": max_attempts})
    daemon.sighup()
    await daemon.until(lambda: daemon.get_json("/status")["retry"]["max_attempts"] == max_attempts, "applied")
    rejected = int(daemon.metric(RELOADS, outcome="refused") - before)
    bed.effects["signals"] += signals
    bed.effects["files_rejected_in_storms"] += rejected
    return rejected


@verb
async def remove_token(bed: Bed, *, instance: int) -> None:
    """Measure how long a token works after it was removed from the file."""
    daemon = bed.instances[instance].daemon
    configured = tokens({TOKEN: ["ingest", "read"], "leaked": ["read"]})
    daemon.configure(api={"tokens": configured})
    await daemon.reload()
    old_token, daemon.token = daemon.token, "leaked"
    assert daemon.get("/status")[0] == 200, "the new token does not work"
    daemon.configure(api={"tokens": configured[:1]})
    started = time.monotonic()
    daemon.sighup()
    await daemon.until(lambda: daemon.get("/status")[0] == UNAUTHORIZED, "rejected")
    bed.record_recovery("token removed from the file: rejected", started, TOKEN_SECONDS)
    daemon.token = old_token


def restart_all(random: Random, rounds: int) -> list[Action]:
    """Restart one instance at a time."""
    actions: list[Action] = []
    for _ in range(rounds):
        for instance in range(3):
            actions += [
                fault("restart_gracefully", instance=instance),
                act("accepted", more=random.randint(30, 120)),
            ]
    return actions


def reload_files(random: Random, rounds: int) -> list[Action]:
    """Reload every invalid file, then valid files many times, then storms of both; remove tokens."""
    actions: list[Action] = []
    for _ in range(rounds):
        for how in random.sample(list(BROKEN), len(BROKEN)):
            actions += [
                fault("reload_bad_file", instance=random.randrange(3), how=how),
                act("accepted", more=random.randint(5, 30)),
            ]
        for instance in range(3):
            actions += [
                fault("send_sighups", instance=instance, count=random.randint(5, 30)),
                fault(
                    "reload_storm",
                    instance=instance,
                    signals=STORM_SIGNALS,
                    max_attempts=random.randint(500, 999),
                ),
                fault("remove_token", instance=instance),
                act("accepted", more=random.randint(5, 30)),
            ]
    return actions


SCENARIOS = (
    Scenario(
        "rolling_restarts",
        "graceful restarts of every instance, one at a time, several rounds",
        "no lease expires, and nothing is sent twice",
        restart_all,
        effects=("restarts",),
        forbidden=("leases_expired", "duplicate_requests"),
        rounds=5,
    ),
    Scenario(
        "reloads",
        "many SIGHUPs, with every kind of invalid file; removed tokens",
        "an invalid file changes nothing; a removed token is rejected within five seconds",
        reload_files,
        effects=("files_rejected", "files_rejected_in_storms", "signals"),
        forbidden=("leases_expired", "duplicate_requests"),
        may_log=("configuration not reloaded",),
        rounds=2,
        needs=Needs(tokens=True),
    ),
)
