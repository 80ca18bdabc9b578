"""/v1/subscriptions/{id}/verify: the challenge, and every way to fail it."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

from standardwebhooks import Webhook

from tests.flow.conftest import HELD, MakeApi
from tests.support.api import Client
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow

if TYPE_CHECKING:
    from collections.abc import Callable


async def test_verification_sends_a_signed_challenge(api: Client, endpoint: Endpoint) -> None:
    """The echo verifies, as JSON or bare; the reference library verifies the challenge's signature."""
    for bare in (False, True):
        endpoint.requests.clear()
        endpoint.echo_challenge(bare=bare)
        created = await api.post(
            "/v1/subscriptions",
            {"event_type": "a", "callback_url": endpoint.url("/hook"), "headers": {"X-Key": "k"}},
        )
        verified = await api.post(f"/v1/subscriptions/{created.body['id']}/verify")
        assert (verified.status, verified.body["verified"]) == (200, True)
        assert verified.body["id"] == created.body["id"]
        [request] = endpoint.requests
        challenge = Webhook(created.body["secret"]).verify(request.body, request.headers)
        assert set(challenge) == {"type", "challenge"}
        assert challenge["type"] == "webhookd.verification"
        assert request.headers["x-key"] == "k"


async def test_failed_verification_names_the_error(api: Client, endpoint: Endpoint) -> None:
    """Each failure of an endpoint is reported, and the subscription stays unverified."""
    created = await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url("/hook")})
    path = f"/v1/subscriptions/{created.body['id']}"
    fails: list[tuple[Callable[[], None], str, int | None]] = [
        (lambda: endpoint.answer(500), "HTTP_500", 500),
        (lambda: endpoint.redirect_to(endpoint.url("/elsewhere")), "HTTP_307", 307),
        (lambda: endpoint.answer(200), "CHALLENGE_MISMATCH", 200),
        (lambda: endpoint.answer(200, b'{"challenge": "other"}'), "CHALLENGE_MISMATCH", 200),
        (lambda: endpoint.answer(200, b"[" * 4000), "CHALLENGE_MISMATCH", 200),
        (lambda: endpoint.answer(200, b"\xff\xfe\x00"), "CHALLENGE_MISMATCH", 200),
        (endpoint.endless_body, "CHALLENGE_MISMATCH", 200),
        (endpoint.close_at_once, "CONNECT_FAILED", None),
        (endpoint.garbage, "PROTOCOL_ERROR", None),
        (endpoint.hang, "TIMEOUT", None),
    ]
    for behave, error_code, status in fails:
        if error_code == "TIMEOUT":
            # Not for the cases above, which respond, however late.
            api.daemon.configure(delivery={"timeout_seconds": 0.2})
            assert await api.daemon.reload()
        behave()
        answer = await api.post(f"{path}/verify")
        assert answer.problem == (422, "verification_failed"), error_code
        assert (answer.body["error_code"], answer.body["response_status"]) == (error_code, status)
    assert (await api.get(path)).body["verified"] is False
    assert (await api.post("/v1/subscriptions/999/verify")).problem == (404, "not_found")


async def test_verification_respects_blocked_addresses(
    make_api: MakeApi, endpoint: Endpoint, flow: Flow
) -> None:
    """An address that was allowed when it was stored, but is not now, is not connected to."""
    api = await make_api()
    created = await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url()})
    api.daemon.configure(delivery={"allow_networks": []})
    assert await api.daemon.reload()
    answer = await api.post(f"/v1/subscriptions/{created.body['id']}/verify")
    assert (answer.code, answer.body["error_code"]) == ("verification_failed", "ADDRESS_BLOCKED")
    assert endpoint.requests == []
    refused = await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url()})
    assert refused.problem == (422, "blocked_address")
    assert await flow.daemon.fetchval("select not bool_or(verified) from webhookd.subscriptions")


async def test_verification_of_a_changed_address_is_stale(make_api: MakeApi, endpoint: Endpoint) -> None:
    """The address changes before the endpoint responds: 409, and not verified."""
    api = await make_api(delivery=HELD)
    may_answer = asyncio.Event()
    loop = asyncio.get_running_loop()
    created = await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url("/old")})
    path = f"/v1/subscriptions/{created.body['id']}"

    async def echo_later(request: Any, connection: Any) -> bool:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(may_answer.wait(), loop))
        body = json.loads(request.body)["challenge"].encode()
        await connection.send(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        return True

    endpoint.behave(echo_later)
    verifying = asyncio.create_task(api.post(f"{path}/verify"))
    await endpoint.received(1)
    await api.patch(path, {"callback_url": endpoint.url("/new")})
    may_answer.set()
    assert (await verifying).problem == (409, "verification_stale")
    assert (await api.get(path)).body["verified"] is False
