"""The list of deliveries with every combination of its filters, compared with a model in Python.

The model filters and sorts all rows. The list must show the same rows in the same order, page by page, also
if a page by event type ends early.
"""

import random
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support.flow import ADDRESS, Flow
from webhookd.core.errors import Refused
from webhookd.core.states import SagaStatus
from webhookd.db.paging import OVERLAP, Page
from webhookd.deliveries import delivery_lists
from webhookd.deliveries.delivery_lists import DeliveryFilter

if TYPE_CHECKING:
    from tests.support.database import Connection

LIMIT = 6
SEED = 17
NUMBER = 90
EVENTS = 30
# The tenant of each subscription.
OWNERS = {1: "", 2: "", 3: "acme", 4: "acme", 5: "globex"}
TYPES = ("order.paid", "order.sent", "silent")
ERRORS = (None, "HTTP_500", "TIMEOUT")
EARLIEST, LATEST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
START = datetime(2026, 3, 1, tzinfo=UTC)
# Ids are taken at least this often, and later than `created_at` by less than the overlap.
STEP = timedelta(seconds=5)
AFTER, BEFORE = START + 20 * STEP, START + 60 * STEP


class Event(NamedTuple):
    """An event of the model."""

    id: int
    event_type: str
    tenant: str
    created_at: datetime


class Saga(NamedTuple):
    """A saga of the model, with its event."""

    id: int
    event: Event
    subscription_id: int
    status: SagaStatus
    error_code: str | None
    created_at: datetime
    resent_from: int | None


def make_rows() -> tuple[list[Event], list[Saga]]:
    """Return random rows. Some events have no saga, and some sagas have an earlier time than those before."""
    choose = random.Random(SEED)  # noqa: S311  the same rows in each run
    events = []
    for number in range(EVENTS):
        event_type, tenant = choose.choice(TYPES), choose.choice(["", "acme"])
        # Pairs of events have the same time, like those of a batch.
        events.append(Event(number + 1, event_type, tenant, START + number // 2 * STEP - OVERLAP))
    sagas: list[Saga] = []
    first_of: dict[tuple[int, int], int] = {}
    for number in range(NUMBER):
        event = choose.choice([event for event in events if event.event_type != "silent"])
        owners = [key for key, tenant in OWNERS.items() if tenant == event.tenant]
        subscription_id = choose.choice(owners)
        status = choose.choice(list(SagaStatus))
        error_code = choose.choice(ERRORS)
        open_for = choose.random() * OVERLAP * 0.99
        resent_from = first_of.get((event.id, subscription_id))
        first_of.setdefault((event.id, subscription_id), number + 1)
        # At most one resend is unfinished.
        if resent_from is not None:
            status = SagaStatus.COMPLETED
        created_at = START + number * STEP - open_for
        sagas.append(Saga(number + 1, event, subscription_id, status, error_code, created_at, resent_from))
    return events, sagas


MODEL_EVENTS, MODEL = make_rows()
COMBINATIONS = [
    DeliveryFilter(*values)
    for values in product(
        (None, "acme"),
        (None, *SagaStatus),
        (None, 2),
        (None, MODEL[0].event.id),
        (None, "order.paid"),
        (None, "HTTP_500"),
        (None, AFTER),
        (None, BEFORE),
    )
]


async def write(superuser: "Connection") -> None:
    """Write the rows of the model."""
    async with superuser.transaction():
        await superuser.execute("set local session_replication_role = replica")
        await superuser.executemany(
            "insert into webhookd.subscriptions (id, event_type, event_types, callback_url, tenant) "
            f"overriding system value values ($1, '*', '{{*}}', '{ADDRESS}', $2)",
            list(OWNERS.items()),
        )
        await superuser.executemany(
            "insert into webhookd.events (id, event_type, tenant, created_at, payload) "
            "overriding system value values ($1, $2, $3, $4, '{}')",
            MODEL_EVENTS,
        )
        await superuser.executemany(
            "insert into webhookd.webhook_delivery_sagas (id, event_id, subscription_id, status, "
            "final_error_code, created_at, resent_from) "
            "overriding system value values ($1, $2, $3, $4, $5, $6, $7)",
            [saga._replace(event=saga.event.id) for saga in MODEL],  # type: ignore[arg-type]
        )


def matches(saga: Saga, wanted: DeliveryFilter) -> bool:
    """Return whether the list must show a saga."""
    return (
        wanted.tenant in (None, saga.event.tenant)
        and wanted.status in (None, saga.status)
        and wanted.subscription_id in (None, saga.subscription_id)
        and wanted.event_id in (None, saga.event.id)
        and wanted.event_type in (None, saga.event.event_type)
        and wanted.error_code in (None, saga.error_code)
        and (wanted.created_after is None or saga.created_at >= wanted.created_after)
        and (wanted.created_before is None or saga.created_at < wanted.created_before)
    )


def expected(wanted: DeliveryFilter) -> list[int]:
    """Return the ids that the list must show, in its order."""
    found = [saga for saga in MODEL if matches(saga, wanted)]
    is_by_event = wanted.event_type and wanted.event_id is None and wanted.created_after is None

    def place(saga: Saga) -> tuple[Any, ...]:
        return (saga.event.created_at, saga.event.id, saga.id) if is_by_event else (saga.id,)

    return [saga.id for saga in sorted(found, key=place, reverse=True)]


async def listed(connection: "Connection", wanted: DeliveryFilter) -> tuple[list[int], int]:
    """Return the ids of all pages, read like the API does, and the number of pages that ended early."""
    ids: list[int] = []
    cut = 0
    cursor = None
    for _ in range(2 * NUMBER):
        found = await delivery_lists.deliveries(connection, Page(LIMIT + 1, cursor), wanted)
        ids += [row["id"] for row in found.rows[:LIMIT]]
        if len(found.rows) > LIMIT:
            cursor = ids[-1]
        elif found.cut_at is not None:
            cursor, cut = found.cut_at, cut + 1
        else:
            return ids, cut
    raise AssertionError("the list does not end")


@pytest.mark.parametrize("max_examined", [delivery_lists.MAX_EXAMINED, 4])
async def test_filters_select_the_rows_of_the_model(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, max_examined: int
) -> None:
    """All combinations, from the first page to the last, also if pages end after a few events."""
    monkeypatch.setattr(delivery_lists, "MAX_EXAMINED", max_examined)
    await write(flow.superuser)
    cut = 0
    for wanted in COMBINATIONS:
        ids, cut_pages = await listed(flow.daemon, wanted)
        assert ids == expected(wanted), wanted
        cut += cut_pages
    assert (cut > 0) is (max_examined < EVENTS)
    assert sum(bool(expected(wanted)) for wanted in COMBINATIONS) > len(COMBINATIONS) // 5


async def test_time_window_is_exact(flow: Flow) -> None:
    """From and until the time of each row, although the order of times is not that of ids."""
    await write(flow.superuser)
    for saga in MODEL:
        for wanted in (
            DeliveryFilter(created_after=saga.created_at),
            DeliveryFilter(created_before=saga.created_at),
            DeliveryFilter(event_type="order.paid", created_after=saga.created_at),
            DeliveryFilter(event_type="order.paid", created_before=saga.created_at),
        ):
            ids, _ = await listed(flow.daemon, wanted)
            assert ids == expected(wanted), wanted


async def test_cursor_of_another_list_is_rejected(flow: Flow) -> None:
    """An event's id is a cursor only in a list by event type. An id above all others is an error."""
    await write(flow.superuser)
    with pytest.raises(Refused, match="cursor: it is of another list"):
        await delivery_lists.deliveries(flow.daemon, Page(LIMIT, -1), DeliveryFilter())
    paid = DeliveryFilter(event_type="order.paid")
    for cursor, what in ((-999, "event"), (999, "delivery")):
        with pytest.raises(Refused, match=f"cursor: {what} 999 does not exist; begin again"):
            await delivery_lists.deliveries(flow.daemon, Page(LIMIT, cursor), paid)


async def test_removed_event_stays_a_cursor(flow: Flow) -> None:
    """The list goes on behind it, from a minute earlier. For a tenant, events of others are removed too."""
    await write(flow.superuser)
    paid = DeliveryFilter(event_type="order.paid", tenant="acme")
    whole = expected(paid)
    events = {saga.id: saga.event for saga in MODEL}
    others = [event for event in MODEL_EVENTS if event.tenant == ""][:-1]
    await flow.superuser.execute("set session_replication_role = replica")
    for hours, event in enumerate(MODEL_EVENTS):
        await flow.superuser.execute(
            "update webhookd.events set created_at = $2 where id = $1",
            event.id,
            START + timedelta(hours=hours),
        )
    for event in others:
        found = await delivery_lists.deliveries(flow.daemon, Page(NUMBER, -event.id), paid)
        assert [row["id"] for row in found.rows] == [
            saga_id for saga_id in whole if events[saga_id].id < event.id + 2
        ], event
    assert whole


async def test_latest_time_is_no_error(flow: Flow) -> None:
    """The end of the calendar, from which no later time exists."""
    await write(flow.superuser)
    for at in (LATEST, EARLIEST):
        for event_type in (None, "order.paid"):
            wanted = DeliveryFilter(event_type=event_type, created_before=at)
            ids, _ = await listed(flow.daemon, wanted)
            assert ids == expected(wanted)
