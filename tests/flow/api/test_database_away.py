"""The API without a database: 503 in time, alive, and working again when the database is back."""

import asyncio
import json
from typing import Any

import pytest

from tests.flow.conftest import MakeApi
from tests.support.api import ApiResponse, Client
from tests.support.flow import Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS
from tests.support.wire import Wire

CLIENTS = 500

REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/events", {"event_type": "a", "payload": 1}),
    ("POST", "/v1/events/batch", {"events": [{"event_type": "a", "payload": 1}]}),
    ("POST", "/v1/subscriptions", {"event_type": "a", "callback_url": "https://receiver.example/"}),
    ("PATCH", "/v1/subscriptions/1", {"active": True}),
    ("POST", "/v1/subscriptions/1/verify", {}),
    ("POST", "/v1/dead-letters/1/requeue", {}),
    ("POST", "/v1/dead-letters/requeue", {}),
    ("GET", "/v1/events", None),
    ("GET", "/v1/deliveries/1", None),
]


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_requests_get_503_in_time_without_a_database(how: str, make_api: MakeApi, wire: Wire) -> None:
    """Stopped or stalled: 503 with Retry-After, /healthz works, and 202 afterwards (see `make ingest`)."""
    api = await make_api(database={"dsn": wire.dsn})
    assert (await api.event()).status == 202
    getattr(wire, how)()

    async def gets_503(method: str, path: str, body: Any) -> None:
        answer = await api.request(method, path, **({} if body is None else {"json": body}))
        assert answer.problem == (503, "unavailable"), (method, path)
        assert answer.headers["Retry-After"]

    for _ in range(2):
        await asyncio.gather(*(gets_503(*request) for request in REQUESTS))
    assert (await api.get("/healthz")).status == 200
    if how == "cut":
        await wire.open()
    else:
        wire.flow()
    await asyncio.wait_for(accepted(api), CONDITION_TIMEOUT_SECONDS)
    assert not api.daemon.logged("a request failed")


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_500_clients_get_503_and_lose_nothing(
    how: str, make_api: MakeApi, wire: Wire, flow: Flow
) -> None:
    """Without the database all get 503 with Retry-After; with the same keys each event is stored once.

    With the database, a client may get 503 too: 500 requests can take longer than ANSWER_TIMEOUT_SECONDS
    where other processes use the machine. As the API asks, it then sends the event again with the same key.
    """
    api = await make_api(database={"dsn": wire.dsn})

    async def post(name: str, number: int) -> ApiResponse:
        return await api.event(payload={"n": number}, idempotency_key=f"{name}-{number}")

    async def store(name: str, number: int) -> ApiResponse:
        while (answer := await post(name, number)).status != 202:
            assert answer.problem == (503, "unavailable")
            await asyncio.sleep(int(answer.headers["Retry-After"]))
        return answer

    async def store_all(name: str) -> list[ApiResponse]:
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            return await asyncio.gather(*(store(name, number) for number in range(CLIENTS)))

    before = await store_all("before")
    getattr(wire, how)()
    during = await asyncio.gather(*(post("during", number) for number in range(CLIENTS)))
    assert {answer.problem for answer in during} == {(503, "unavailable")}
    assert all(answer.headers["Retry-After"] for answer in during)
    if how == "cut":
        await wire.open()
    else:
        wire.flow()
    await asyncio.wait_for(accepted(api), CONDITION_TIMEOUT_SECONDS)
    after = await store_all("during")
    rows = await flow.daemon.fetch(
        "select id, idempotency_key as key, payload from webhookd.events where idempotency_key is not null"
    )
    stored = {row["key"]: (row["id"], json.loads(row["payload"])["n"]) for row in rows}
    assert len(rows) == len(stored) == 2 * CLIENTS
    for name, answers in (("before", before), ("during", after)):
        for number, answer in enumerate(answers):
            assert stored[f"{name}-{number}"] == (answer.body["id"], number)
    assert not api.daemon.logged("a request failed")


async def accepted(api: Client) -> None:
    """Return when an event is accepted."""
    while (await api.event()).status != 202:  # noqa: ASYNC110  polls the daemon
        await asyncio.sleep(0.05)
