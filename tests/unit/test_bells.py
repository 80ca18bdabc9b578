"""Wake-ups inside a process."""

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from tests.support.waiting import finished, until_true
from webhookd.wakeups import SHADOW_LOOKS, Bells, Work

if TYPE_CHECKING:
    from webhookd.db.pool import Pool

LONG = 3600.0


async def waiting(bells: Bells, *works: Work) -> "asyncio.Task[set[Work]]":
    """Somebody who waits, and is seen to wait."""
    task = asyncio.create_task(bells.wait(*works, timeout_seconds=LONG))
    assert not await finished(task)
    return task


async def test_a_ring_wakes_who_waits_for_it() -> None:
    """And nobody else; which it was, is told once."""
    bells = Bells()
    for_jobs = await waiting(bells, Work.JOBS)
    for_two = await waiting(bells, Work.RESULTS, Work.SAGAS)
    bells.ring_here(Work.SAGAS)
    bells.ring_here(Work.SAGAS)
    assert await for_two == {Work.SAGAS}
    assert not await finished(for_jobs)
    bells.ring_here(Work.JOBS)
    assert await for_jobs == {Work.JOBS}
    assert not await finished(await waiting(bells, *Work))


async def test_a_ring_before_the_wait_counts() -> None:
    """So nothing is lost between a look and the wait after it."""
    bells = Bells()
    bells.ring_all_here()
    assert await bells.wait(Work.EVENTS, timeout_seconds=LONG) == {Work.EVENTS}
    assert await bells.wait(Work.RESULTS, Work.SAGAS, timeout_seconds=LONG) == {Work.RESULTS, Work.SAGAS}


async def test_a_hint_does_not_hide_a_ring_without_one() -> None:
    """Who rings with a hint wakes, and has nothing searched for; beside it the other's ring is still told."""
    bells = Bells()
    woken = await waiting(bells, Work.SAGAS)
    bells.ring(Work.SAGAS, hinted=True)
    assert await woken == set()
    bells.ring_here(Work.SAGAS, hinted=True)
    bells.hear(Work.SAGAS)
    bells.ring_here(Work.SAGAS, hinted=True)
    assert await bells.wait(Work.SAGAS, timeout_seconds=LONG) == {Work.SAGAS}


async def test_the_time_ends_a_wait() -> None:
    """With nothing rung."""
    assert await Bells().wait(Work.EVENTS, timeout_seconds=0) == set()


@pytest.mark.parametrize(("work", "looks"), [(Work.JOBS, 1), (Work.EVENTS, SHADOW_LOOKS[Work.EVENTS])])
async def test_another_process_is_heard_once_more_and_again(work: Work, looks: int) -> None:
    """What comes in the shadow of its wake-up is looked for a moment later, and of events in between."""
    bells = Bells()
    bells.hear(work)
    for _ in range(1 + looks):
        assert await bells.wait(work, timeout_seconds=LONG) == {work}
    assert not await finished(await waiting(bells, work))


async def test_a_ring_in_the_shadow_makes_it_longer() -> None:
    """One that comes before the other's last look has all of its own."""
    bells = Bells()
    bells.hear(Work.EVENTS)
    for _ in range(SHADOW_LOOKS[Work.EVENTS]):
        await bells.wait(Work.EVENTS, timeout_seconds=LONG)
    bells.hear(Work.EVENTS)
    for _ in range(2 + SHADOW_LOOKS[Work.EVENTS]):
        assert await bells.wait(Work.EVENTS, timeout_seconds=LONG) == {Work.EVENTS}
    assert not await finished(await waiting(bells, Work.EVENTS))


async def test_who_waits_here_is_told_before_other_processes() -> None:
    """A NOTIFY is a commit: at once where nobody here takes the work, else when it had time to be done."""
    bells = Bells()
    bells.ring(Work.JOBS)
    assert bells.to_announce
    bells = Bells()
    woken = await waiting(bells, Work.JOBS)
    bells.ring(Work.JOBS)
    assert not bells.to_announce
    await woken
    await until_true(lambda: bool(bells.to_announce))


async def test_who_serves_is_told_before_other_processes() -> None:
    """Also while it is at work and does not wait; when it has gone, the others are told at once."""
    bells = Bells()
    with bells.serving(Work.RESULTS):
        bells.ring(Work.RESULTS)
        assert not bells.to_announce
    bells.ring(Work.RESULTS)
    assert bells.to_announce


async def test_what_is_taken_is_not_announced() -> None:
    """Neither now nor later; and what another stage has to tell takes nothing of it along."""
    bells = Bells()
    with bells.serving(Work.RESULTS), bells.serving(Work.SAGAS):
        bells.ring(Work.RESULTS)
        bells.ring(Work.SAGAS)
        bells.taken(Work.RESULTS)
        await until_true(lambda: bool(bells.to_announce))
        assert bells.to_announce == {Work.SAGAS}


async def test_what_is_taken_before_it_is_told_is_not_announced() -> None:
    """Its time had come, and who announces was not ready yet: no call is made for nothing."""
    bells = Bells()
    with bells.serving(Work.SAGAS):
        bells.ring(Work.SAGAS)
        await until_true(lambda: bool(bells.to_announce))
        bells.taken(Work.SAGAS)
    assert not bells.will_announce(Work.SAGAS)
    unconnected = cast("Pool", None)
    announcing = asyncio.create_task(bells.announce(unconnected))
    assert not await finished(announcing)
    announcing.cancel()


async def test_who_gives_up_is_forgotten() -> None:
    """A cancelled wait leaves nothing behind, and takes no ring."""
    bells = Bells()
    gone = await waiting(bells, Work.JOBS)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    bells.ring_here(Work.JOBS)
    assert await bells.wait(Work.JOBS, timeout_seconds=LONG) == {Work.JOBS}


async def test_an_ear_takes_a_ring_from_nobody() -> None:
    """Two that overhear and one that waits are all woken by one ring, also by one before they rest."""
    bells = Bells()
    with bells.overhearing(Work.EVENTS) as one, bells.overhearing(Work.EVENTS) as other:
        bells.ring_here(Work.EVENTS)
        await one.rest(0, LONG)
        await other.rest(0, LONG)
        assert await bells.wait(Work.EVENTS, timeout_seconds=LONG) == {Work.EVENTS}
        resting = asyncio.create_task(one.rest(0, LONG))
        bells.ring_here(Work.JOBS)
        assert not await finished(resting)
        bells.ring_here(Work.EVENTS)
        await resting
