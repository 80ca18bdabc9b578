"""Lists over HTTP, from the first page to the last: each row once, in order, with every filter."""

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.flow import Flow
from tests.support.history import RARE_ERROR, write_history

SIZE = 20_000
PAGES = 7
MAX_LIMIT = 1000
TIME = '\'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\''

# A list, with a dead letter's time in place of {time}, and the same in SQL.
LISTS = {
    "/v1/deliveries": "webhook_delivery_sagas where true order by id desc",
    "/v1/deliveries?status=Completed": "webhook_delivery_sagas where status = 'Completed' order by id desc",
    "/v1/deliveries?subscription_id=7": "webhook_delivery_sagas where subscription_id = 7 order by id desc",
    "/v1/deliveries?subscription_id=400&status=DeadLettered": (
        "webhook_delivery_sagas where subscription_id = 400 and status = 'DeadLettered' order by id desc"
    ),
    "/v1/deliveries?event_id=9": "webhook_delivery_sagas where event_id = 9 order by id desc",
    "/v1/events": "events where true order by id desc",
    "/v1/events?event_type=type.n7": "events where event_type = 'type.n7' order by id desc",
    "/v1/dead-letters": "dead_letters where true order by failed_at desc, id desc",
    f"/v1/dead-letters?error_code={RARE_ERROR}": (
        f"dead_letters where final_error_code = '{RARE_ERROR}' order by failed_at desc, id desc"
    ),
    "/v1/dead-letters?failed_before={time}": (
        "dead_letters where failed_at < {moment} order by failed_at desc, id desc"
    ),
    "/v1/dead-letters?error_code=HTTP_500&failed_after={time}": (
        "dead_letters where final_error_code = 'HTTP_500' and failed_at >= {moment} "
        "order by failed_at desc, id desc"
    ),
    "/v1/subscriptions?active=true": "subscriptions where active order by id desc",
}


async def test_pages_of_a_list_contain_each_row_once(make_api: MakeApi, flow: Flow) -> None:
    """Every page but the last is full; together they equal the table, also with equal times."""
    await write_history(flow.superuser, SIZE)
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        # Many at the same time, like the dead letters of one batch.
        await flow.superuser.execute(
            "update webhookd.dead_letters set failed_at = 'yesterday'::timestamptz + id / 99 * '1s'::interval"
        )
    moment = "(select failed_at from webhookd.dead_letters where id = 99)"
    time = await flow.daemon.fetchval(f"select to_char({moment} at time zone 'utc', {TIME})")
    api = await make_api(services={"enabled": ["api"]})
    for path, rows in LISTS.items():
        found = await flow.daemon.fetch(f"select id from webhookd.{rows.format(moment=moment)}")
        expected = [row["id"] for row in found]
        assert expected
        limit = min(len(expected) // PAGES + 1, MAX_LIMIT)
        pages = await api.pages(path.format(time=time), limit)
        assert {len(page) for page in pages[:-1]} <= {limit}, path
        assert [row for page in pages for row in page] == expected, path


async def test_c7_unknown_cursor_is_rejected(api: Client) -> None:
    """A list by time needs the cursor's row to find its position."""
    event_id = (await api.event()).body["id"]
    answer = await api.get(f"/v1/dead-letters?cursor={event_id}")
    assert answer.problem == (422, "invalid_parameter")
    assert "cursor" in answer.body["detail"]
    assert (await api.get("/v1/events?event_type=order.created&cursor=999")).status == 422
    page = await api.get(f"/v1/events?event_type=order.created&cursor={event_id}")
    assert page.body == {"items": [], "next_cursor": None}
