"""Wake-ups inside a process, and when they become a NOTIFY."""

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from tests.support.waiting import finished, until_true
from webhookd import wakeups as wakeups_module
from webhookd.wakeups import FOLLOW_UPS, MAX_IDS, Inbox, WakeUps, Work

if TYPE_CHECKING:
    from webhookd.db.pool import Pool

LONG = 3600.0


async def waiting(inbox: Inbox) -> "asyncio.Task[bool]":
    """Start a wait, and see that it waits."""
    task = asyncio.create_task(inbox.wait(LONG))
    assert not await finished(task)
    return task


def will_notify(wakeups: WakeUps, work: Work) -> bool:
    """Whether a NOTIFY for this work is pending."""
    return work in wakeups._to_notify or work in wakeups._notify_timers


async def test_wake_up_ends_the_wait_for_its_work_only() -> None:
    """Two wake-ups before the waiter runs count as one; the inbox of other work keeps waiting."""
    wakeups = WakeUps()
    sagas = wakeups.inbox(Work.SAGAS)
    for_attempts = await waiting(wakeups.inbox(Work.ATTEMPTS))
    for_sagas = await waiting(sagas)
    wakeups.wake(Work.SAGAS)
    wakeups.wake(Work.SAGAS)
    assert await for_sagas is False
    assert not await finished(for_attempts)
    assert not await finished(await waiting(sagas))


async def test_wake_up_before_the_wait_counts() -> None:
    """Nothing is lost between a query and the wait after it."""
    wakeups = WakeUps()
    inbox = wakeups.inbox(Work.EVENTS)
    wakeups.wake_all()
    assert await inbox.wait(LONG) is True


async def test_ids_do_not_hide_a_request_to_search() -> None:
    """A wake-up with ids needs no search; beside it, a wake-up without ids still asks for one."""
    wakeups = WakeUps()
    inbox = wakeups.inbox(Work.SAGAS)
    waiter = await waiting(inbox)
    wakeups.wake(Work.SAGAS, [7])
    assert await waiter is False
    wakeups.wake(Work.SAGAS, [8])
    wakeups.received(Work.SAGAS)
    wakeups.wake(Work.SAGAS, [9])
    assert await inbox.wait(LONG) is True
    assert inbox.take() == [7, 8, 9]
    assert not inbox.has_ids


def test_ids_are_taken_in_order_once_and_up_to_a_limit() -> None:
    """A duplicate id keeps its first place."""
    inbox = WakeUps().inbox(Work.RESULTS)
    inbox.put([3, 1, 2, 3], search=False)
    assert inbox.take(2) == [3, 1]
    assert inbox.has_ids
    assert inbox.take(2) == [2]
    assert inbox.take() == []


async def test_too_many_ids_become_a_search() -> None:
    """Memory is bounded, and ids that do not fit are found in the database."""
    wakeups = WakeUps()
    inbox = wakeups.inbox(Work.RESULTS)
    wakeups.wake(Work.RESULTS, range(MAX_IDS))
    assert await inbox.wait(LONG) is False
    wakeups.wake(Work.RESULTS, [MAX_IDS])
    assert await inbox.wait(LONG) is True
    assert len(inbox.take()) == MAX_IDS


async def test_timeout_ends_the_wait() -> None:
    """Polling covers lost wake-ups."""
    assert await WakeUps().inbox(Work.EVENTS).wait(0) is False


@pytest.mark.parametrize(("work", "follow_ups"), [(Work.ATTEMPTS, 1), (Work.EVENTS, FOLLOW_UPS[Work.EVENTS])])
async def test_notify_is_followed_by_more_checks(work: Work, follow_ups: int) -> None:
    """publish() throttles its NOTIFY, so the stage checks again for events committed in the gap."""
    wakeups = WakeUps()
    inbox = wakeups.inbox(work)
    wakeups.received(work)
    for _ in range(1 + follow_ups):
        assert await inbox.wait(LONG) is True
    assert not await finished(await waiting(inbox))


async def test_notify_during_the_follow_ups_restarts_them() -> None:
    """A NOTIFY before the last check gets a full series of its own."""
    wakeups = WakeUps()
    inbox = wakeups.inbox(Work.EVENTS)
    wakeups.received(Work.EVENTS)
    for _ in range(FOLLOW_UPS[Work.EVENTS]):
        await inbox.wait(LONG)
    wakeups.received(Work.EVENTS)
    for _ in range(2 + FOLLOW_UPS[Work.EVENTS]):
        assert await inbox.wait(LONG) is True
    assert not await finished(await waiting(inbox))


async def test_notify_is_sent_at_once_only_if_no_consumer_waits_here() -> None:
    """A NOTIFY is a commit: with a waiting consumer it is delayed, so that the work can be done first."""
    wakeups = WakeUps()
    inbox = wakeups.inbox(Work.ATTEMPTS)
    wakeups.wake(Work.ATTEMPTS, notify=True)
    assert wakeups._to_notify
    wakeups = WakeUps()
    inbox = wakeups.inbox(Work.ATTEMPTS)
    waiter = await waiting(inbox)
    wakeups.wake(Work.ATTEMPTS, notify=True)
    assert not wakeups._to_notify
    await waiter
    await until_true(lambda: bool(wakeups._to_notify))


async def test_running_consumer_delays_the_notify_even_while_it_works() -> None:
    """After it has ended, a NOTIFY is sent at once."""
    wakeups = WakeUps()
    with wakeups.inbox(Work.RESULTS):
        wakeups.wake(Work.RESULTS, notify=True)
        assert not wakeups._to_notify
    wakeups.wake(Work.RESULTS, notify=True)
    assert wakeups._to_notify


async def test_handled_work_is_not_notified() -> None:
    """Only the NOTIFY of the handled work is cancelled."""
    wakeups = WakeUps()
    with wakeups.inbox(Work.RESULTS) as results, wakeups.inbox(Work.SAGAS):
        wakeups.wake(Work.RESULTS, notify=True)
        wakeups.wake(Work.SAGAS, notify=True)
        results.handled_here()
        await until_true(lambda: bool(wakeups._to_notify))
        assert wakeups._to_notify == {Work.SAGAS}


async def test_work_handled_before_the_notifier_runs_costs_no_statement() -> None:
    """The delay is over, but the notifier was busy: it sends nothing."""
    wakeups = WakeUps()
    with wakeups.inbox(Work.SAGAS) as sagas:
        wakeups.wake(Work.SAGAS, notify=True)
        await until_true(lambda: bool(wakeups._to_notify))
        sagas.handled_here()
    assert not will_notify(wakeups, Work.SAGAS)
    unconnected = cast("Pool", None)
    notifier = asyncio.create_task(wakeups.run_notifier(unconnected))
    assert not await finished(notifier)
    notifier.cancel()


async def test_cancelled_wait_takes_no_wake_up() -> None:
    """The next wait gets it."""
    wakeups = WakeUps()
    inbox = wakeups.inbox(Work.ATTEMPTS)
    cancelled = await waiting(inbox)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not inbox.is_attended
    wakeups.wake(Work.ATTEMPTS, search=True)
    assert await inbox.wait(LONG) is True


async def test_every_inbox_of_a_work_gets_the_wake_up() -> None:
    """Several consumers of events do not take wake-ups from each other, and a closed inbox gets none."""
    wakeups = WakeUps()
    first, second, closed = (wakeups.inbox(Work.EVENTS) for _ in range(3))
    closed.close()
    wakeups.wake(Work.EVENTS)
    await first.rest(0, LONG)
    await second.rest(0, LONG)
    assert not await finished(await waiting(closed))
    resting = asyncio.create_task(first.rest(0, LONG))
    wakeups.wake(Work.ATTEMPTS)
    assert not await finished(resting)
    wakeups.wake(Work.EVENTS)
    await resting


async def test_results_wake_the_starter_at_once_only_where_deliveries_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are looked at later, all in one batch."""
    wakeups = WakeUps()
    with wakeups.inbox(Work.SAGAS) as inbox:
        wakeups.held_up = {1}
        monkeypatch.setattr(wakeups_module, "FREED_SECONDS", 0)
        wakeups.freed({1, 2})
        assert inbox.take() == [1]
        wakeups.freed({3})
        assert inbox.take() == []
        await until_true(lambda: inbox.has_ids)
        assert inbox.take() == [2, 3]


async def test_results_that_the_starter_did_not_see_wake_it_at_once() -> None:
    """A result that comes while the starter finds a full window is not forgotten."""
    wakeups = WakeUps()
    with wakeups.inbox(Work.SAGAS) as inbox:
        wakeups.freed({1, 2})
        wakeups.found_held_up({1})
        assert inbox.take() == [1]
        wakeups.found_held_up({1})
        assert inbox.take() == [], "once is enough"


async def test_results_are_notified_at_once_if_the_starter_runs_elsewhere() -> None:
    """Only that instance knows what waits."""
    wakeups = WakeUps()
    wakeups.freed({1})
    assert wakeups._to_notify == {Work.SAGAS}


@pytest.mark.parametrize(
    ("window_is_full", "has_free_slots", "urgent"),
    [(False, False, False), (True, False, False), (False, True, False), (True, True, True)],
)
def test_results_are_urgent_if_only_a_full_window_holds_deliveries_up(
    *, window_is_full: bool, has_free_slots: bool, urgent: bool
) -> None:
    """With no free slot, or no delivery waiting for its window, results can wait for a batch."""
    wakeups = WakeUps()
    wakeups.window_is_full, wakeups.has_free_slots = window_is_full, has_free_slots
    assert wakeups.results_are_urgent is urgent
