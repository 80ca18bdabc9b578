"""The commands' HTTP client against servers that answer in unusual ways."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.support.waiting import until_true
from webhookd.cli import client as client_module
from webhookd.cli.client import Client, Place
from webhookd.core.errors import RequestRefused, ServiceUnavailable, WebhookdError

HEAD = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def answering(*pieces: bytes, closes: bool = True) -> AsyncIterator[tuple[Client, list[bytes]]]:
    """Serve these bytes to every request, and record the requests."""
    requests = []
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if not closes:
            await reader.read()  # until the client closes the connection
            gone.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Client(Place(urlsplit(f"http://127.0.0.1:{port}/base/"), "the test"), "secret"), requests
    if not closes:
        await asyncio.wait_for(gone.wait(), 10)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b'Content-Length: 7\r\n\r\n{"a":1}'],
        [HEAD, b"Content-Length: 7\r\n\r\n", b'{"a"', b":1}"],
        [HEAD + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n'],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n", HEAD + b'Content-Length: 7\r\n\r\n{"a":1}'],
    ],
    ids=["length", "in pieces", "chunked", "after an interim response"],
)
async def test_response_is_read_to_its_end(pieces: list[bytes], closes: bool) -> None:
    """Also from a server that keeps the connection open."""
    async with answering(*pieces, closes=closes) as (client, requests):
        assert (await client.request("POST", "/v1/x?y=1", {"b": 2})).value == {"a": 1}
    [request] = requests
    assert request.startswith(b"POST /base/v1/x?y=1 HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in request
    assert b"\r\nContent-Length: 7\r\n" in request


async def test_body_without_length_ends_with_the_connection() -> None:
    """As HTTP/1.0 servers send it."""
    async with answering(b'HTTP/1.0 200 OK\r\n\r\n{"a":1}') as (client, _):
        assert (await client.request("GET", "/")).value == {"a": 1}


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([], "closed the connection"),
        ([HEAD], "closed the connection"),
        ([HEAD + b"Content-Length: 9\r\n\r\n{}"], "closed the connection"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{}"], "closed the connection"),
        ([b"SSH-2.0-OpenSSH\r\n"], "is not HTTP"),
        (
            [b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"],
            "is not HTTP",
        ),
    ],
)
async def test_incomplete_response_is_no_response(pieces: list[bytes], reason: str) -> None:
    """After a POST the error says that the request may have taken effect."""
    async with answering(*pieces) as (client, _):
        with pytest.raises(ServiceUnavailable, match=reason) as caught:
            await client.request("POST", "/")
        assert "unknown whether the request took effect" in str(caught.value)


async def test_request_has_a_deadline() -> None:
    """A server that accepts the request and sends half of a response."""
    async with answering(HEAD, closes=False) as (client, _):
        with pytest.raises(ServiceUnavailable, match="timed out"):
            await client.request("GET", "/", timeout_seconds=0.05)


async def test_response_has_a_maximum_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is not read."""
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 1000)
    async with answering(HEAD + b"Content-Length: 5000\r\n\r\n" + b" " * 5000, closes=False) as (client, _):
        with pytest.raises(ServiceUnavailable, match="larger than 1000 bytes"):
            await client.request("GET", "/")


async def test_cancelled_request_closes_the_connection() -> None:
    """The daemon notices it: `answering` waits for the end of the connection."""
    async with answering(closes=False) as (client, requests):
        task = asyncio.create_task(client.request("GET", "/"))
        await until_true(lambda: bool(requests))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_redirect_is_not_followed() -> None:
    """It is rejected like any other response that is not webhookd's."""
    async with answering(b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n") as (client, _):
        with pytest.raises(RequestRefused, match=r"does not come from webhookd \(HTTP 302\)"):
            await client.request("GET", "/")


@pytest.mark.parametrize("path", ["/a b", "/a\r\nx: y", "/é"])
async def test_path_cannot_contain_a_header(path: str) -> None:
    """Such a path never leaves this process."""
    client = Client(Place(urlsplit("http://127.0.0.1:1"), "the test"))
    with pytest.raises(WebhookdError, match="not a valid path"):
        await client.request("GET", path)
