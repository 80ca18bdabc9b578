"""Without the database: 503 in time, alive all the while, and as before once it is back."""

import asyncio
import time
from typing import Any

import pytest

from tests.flow.api.conftest import UNAVAILABLE_SECONDS
from tests.flow.conftest import MakeApi
from tests.support.wire import Wire

QUESTIONS: list[tuple[str, str, Any]] = [
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
async def test_without_the_database_everything_is_503_in_time(
    how: str, make_api: MakeApi, wire: Wire
) -> None:
    """Gone or silent: 503 with Retry-After within the bound, alive all the while, and 202 again after it."""
    api = await make_api(database={"dsn": wire.dsn})
    assert (await api.event()).status == 202
    getattr(wire, how)()

    async def timed(method: str, path: str, body: Any) -> None:
        started = time.monotonic()
        answer = await api.ask(method, path, **({} if body is None else {"json": body}))
        assert answer.told == (503, "unavailable"), (method, path)
        assert answer.headers["Retry-After"]
        assert time.monotonic() - started < UNAVAILABLE_SECONDS, (method, path)

    for _ in range(2):
        await asyncio.gather(*(timed(*question) for question in QUESTIONS))
    assert (await api.get("/healthz")).status == 200
    if how == "cut":
        await wire.open()
    else:
        wire.flow()

    async def accepted() -> None:
        while (await api.event()).status != 202:  # noqa: ASYNC110  it is the daemon that is asked
            await asyncio.sleep(0.05)

    await asyncio.wait_for(accepted(), 10)
    assert not api.daemon.logged("a request failed")
