"""The HTTP client of the commands: sends requests to a daemon's API, and owns --url, --token-file, --ca-file.

It uses no proxy and follows no redirect. Every request has a deadline and every response a maximum size. A
rejected request raises. asyncio and llhttp do the work, not aiohttp: importing aiohttp takes 0.15 s, and
`webhookd status` takes 0.13 s in all.
"""

import asyncio
import functools
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlencode, urlsplit

import click
import httptools
import msgspec

from webhookd import __version__
from webhookd.cli.options import escaped, read_bounded
from webhookd.core.configuration import load_settings
from webhookd.core.errors import ConfigurationError, RequestRefused, ServiceUnavailable, WebhookdError
from webhookd.core.settings import host_and_port

CONNECT_TIMEOUT_SECONDS = 5.0
ANSWER_TIMEOUT_SECONDS = 30.0
# A page of the largest rows is far smaller.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_TOKEN_BYTES = 4096
PAGE_SIZE = 500
NOT_WEBHOOKD = "the response does not come from webhookd"

_CHUNK_BYTES = 65_536
_FIRST_FINAL = 200
_FIRST_ERROR = 300
_UNAUTHORIZED = 401
_UNAVAILABLE = (502, 503, 504)
# A daemon that listens on every address is reached on loopback.
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  nothing is bound here

Value = TypeVar("Value")


class Place(NamedTuple):
    """The URL of a daemon, and the option or setting that it comes from."""

    url: SplitResult
    source: str

    def __str__(self) -> str:
        return f"{self.url.geturl()} ({self.source})"


class Answer(NamedTuple):
    """The body of a successful response."""

    body: bytes

    @property
    def value(self) -> dict[str, Any]:
        """The decoded body: every response is a JSON object."""
        return _decoded(self.body, dict[str, Any])

    @property
    def fields(self) -> dict[str, msgspec.Raw]:
        """The members, not decoded: a payload may contain numbers that Python cannot represent."""
        return _decoded(self.body, dict[str, msgspec.Raw])


class RowPage(msgspec.Struct):
    """One page of a list. The rows are not decoded."""

    items: list[msgspec.Raw]
    next_cursor: int | str | None


class Client:
    """Sends requests to one daemon, each on its own connection: there are few, and the daemon may restart.

    Commands that run in an event loop use `request` and `pages`. The other methods block.
    """

    def __init__(self, place: Place, token: str | None = None, ca_file: Path | None = None) -> None:
        self.place: Final = place
        self._token = token
        self._tls = _tls_context(ca_file) if place.url.scheme == "https" else None

    def get(self, path: str, query: Mapping[str, object] | None = None) -> Answer:
        return asyncio.run(self.request("GET", path + _query(query or {})))

    def post(
        self, path: str, value: object = None, *, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS
    ) -> Answer:
        return asyncio.run(self.request("POST", path, value, timeout_seconds))

    def patch(self, path: str, value: object) -> Answer:
        return asyncio.run(self.request("PATCH", path, value))

    def put(self, path: str, value: object) -> Answer:
        return asyncio.run(self.request("PUT", path, value))

    def delete(self, path: str) -> Answer:
        return asyncio.run(self.request("DELETE", path))

    def rows(
        self, path: str, query: Mapping[str, object] | None = None, limit: int | None = None
    ) -> Iterator[msgspec.Raw]:
        """Yield the rows of a list. The next page is requested after the last row of this one was used."""
        pages = self.pages(path, query, limit)

        async def next_page() -> list[msgspec.Raw] | None:
            return await anext(pages, None)

        with asyncio.Runner() as runner:
            while (page := runner.run(next_page())) is not None:
                yield from page

    async def pages(
        self, path: str, query: Mapping[str, object] | None = None, limit: int | None = None
    ) -> AsyncIterator[list[msgspec.Raw]]:
        """Yield the rows of a list page by page, not decoded."""
        left = limit
        filters = dict(query or {})
        while left is None or left > 0:
            filters["limit"] = PAGE_SIZE if left is None else min(left, PAGE_SIZE)
            page = _decoded((await self.request("GET", path + _query(filters))).body, RowPage)
            yield page.items
            if page.next_cursor is None:
                return
            filters["cursor"] = page.next_cursor
            left = None if left is None else left - len(page.items)

    async def request(
        self, method: str, path: str, value: object = None, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS
    ) -> Answer:
        """Send a value as JSON and return the response. A msgspec.Raw in it is sent byte for byte.

        Cancelling this closes the connection, which shows the daemon that the response is not needed.
        """
        message = self._message(method, path, b"" if value is None else msgspec.json.encode(value))
        reader, writer = await self._connect()
        try:
            async with asyncio.timeout(timeout_seconds):
                writer.write(message)
                status, body = await _read_response(reader)
        except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            effect = "" if method == "GET" else "; it is unknown whether the request took effect"
            raise ServiceUnavailable(
                f"no response from the daemon at {self.place}: {_reason(error)}{effect}"
            ) from error
        finally:
            writer.transport.abort()
        if status >= _FIRST_ERROR:
            raise self._rejection(status, body)
        return Answer(body)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = self.place.url
        port = url.port or (80 if self._tls is None else 443)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                return await asyncio.open_connection(url.hostname, port, ssl=self._tls)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
            raise ServiceUnavailable(
                f"no daemon at {self.place}: {_reason(error)}; start one with `webhookd serve`, "
                "or set its address with --url or WEBHOOKD_URL"
            ) from error

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        target = self.place.url.path.rstrip("/") + path
        if not target.isascii() or not target.isprintable() or " " in target:
            raise WebhookdError(f"{escaped(target)} is not a valid path")
        lines = [
            f"{method} {target} HTTP/1.1",
            f"Host: {self.place.url.netloc}",
            "Accept: application/json",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"User-Agent: webhookd/{__version__}",
        ]
        if self._token is not None:
            lines.append(f"Authorization: Bearer {self._token}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _rejection(self, status: int, body: bytes) -> WebhookdError:
        try:
            problem = msgspec.json.decode(body, type=dict[str, Any])
            code, detail = escaped(problem["code"]), escaped(problem["detail"])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
            problem, code, detail = {}, f"HTTP {status}", NOT_WEBHOOKD
        if status in _UNAVAILABLE:
            return ServiceUnavailable(f"the daemon at {self.place} is unavailable: {detail} ({code})")
        if status == _UNAUTHORIZED:
            detail = (
                "the daemon requires a token: set WEBHOOKD_TOKEN, or use --token-file FILE"
                if self._token is None
                else "the daemon does not accept this token (from WEBHOOKD_TOKEN or --token-file)"
            )
        return RequestRefused(f"{detail} ({code})", status, code, problem)


class _Response:
    """Receives llhttp's callbacks for one response."""

    def __init__(self) -> None:
        self.parser: Final = httptools.HttpResponseParser(self)
        self.body: Final = bytearray()
        self.is_complete = False
        self.ends_with_connection = False
        self._has_length = False

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code())

    def on_header(self, name: bytes, _: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.ends_with_connection = self.status >= _FIRST_FINAL and not self._has_length

    def on_body(self, data: bytes) -> None:
        self.body.extend(data)

    def on_message_complete(self) -> None:
        self.is_complete = self.status >= _FIRST_FINAL


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    response = _Response()
    received_bytes = 0
    while not response.is_complete:
        data = await reader.read(_CHUNK_BYTES)
        if not data:
            if response.ends_with_connection:
                break
            raise ConnectionError("the daemon closed the connection")
        received_bytes += len(data)
        if received_bytes > MAX_ANSWER_BYTES:
            raise ConnectionError(f"the response is larger than {MAX_ANSWER_BYTES} bytes")
        response.parser.feed_data(data)
    return response.status, bytes(response.body)


def asks_daemon(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select a daemon, and pass a Client for it as the command's first argument."""

    @click.option("--url", metavar="URL", help="URL of the daemon (default: $WEBHOOKD_URL, or api.listen).")
    @click.option(
        "--token-file",
        metavar="FILE",
        help="Read the API token from this file, or from stdin with - (default: $WEBHOOKD_TOKEN).",
    )
    @click.option(
        "--ca-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="CA certificates to trust for an https URL, in addition to the system's.",
    )
    @click.option("--token", hidden=True, expose_value=False, callback=_reject_secret)
    @click.pass_context
    @functools.wraps(command)
    def wrapped(
        context: click.Context,
        /,
        url: str | None,
        token_file: str | None,
        ca_file: Path | None,
        **arguments: Any,
    ) -> None:
        config_path = context.find_object(Path)
        client = Client(find_daemon(url, config_path), _token(token_file), ca_file)
        try:
            command(client, **arguments)
        except (KeyError, TypeError, AttributeError) as error:  # the response of another version
            raise unexpected(client, error) from error

    return wrapped


def unexpected(client: Client, error: Exception) -> WebhookdError:
    """Return the error for a response that lacks the expected members."""
    return WebhookdError(
        f"{client.place} sent a response that this version ({__version__}) does not understand: {error}"
    )


def find_daemon(url: str | None, config_path: Path | None) -> Place:
    """Use --url, else WEBHOOKD_URL, else api.listen of the configuration."""
    for given, source in ((url, "--url"), (os.environ.get("WEBHOOKD_URL"), "WEBHOOKD_URL")):
        if given:
            return Place(_parsed(given, source), source)
    try:
        settings = load_settings(config_path, os.environ)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (with --url, no configuration is needed)") from error
    host, port = host_and_port(settings.api.listen)
    host = _LOOPBACK_OF.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return Place(urlsplit(f"http://{shown}:{port}"), "api.listen in the configuration")


def _parsed(text: str, source: str) -> SplitResult:
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and url.hostname and (url.port is None or url.port > 0)
    except ValueError:
        usable = False
    if not usable or not text.isascii() or not text.isprintable() or " " in text:
        raise click.UsageError(f"{source}: {escaped(text)} is not a URL like http://127.0.0.1:8470")
    if url.username is not None or url.query or url.fragment:
        raise click.UsageError(f"{source}: the URL may only have a scheme, a host, a port and a path")
    return url


def _reject_secret(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            "--token: every user of this machine can see arguments; "
            "set WEBHOOKD_TOKEN, or use --token-file FILE"
        )


def _token(file: str | None) -> str | None:
    if file is None:
        text = os.environ.get("WEBHOOKD_TOKEN", "")
    else:
        text = read_bounded(file, "--token-file", MAX_TOKEN_BYTES).decode("ascii", "replace")
    token = text.strip()
    if file is not None and not token:
        raise click.UsageError(f"--token-file: {file} is empty")
    if not token.isascii() or not token.isprintable():
        source = "WEBHOOKD_TOKEN" if file is None else f"--token-file: {file}"
        raise click.UsageError(f"{source} is not a token: it must be printable ASCII")
    return token or None


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:
            raise click.UsageError(f"--ca-file: {ca_file} cannot be used: {_reason(error)}") from error
    return context


def _query(query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _reason(error: Exception) -> str:
    """Say why there was no response."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not trusted: {escaped(error.verify_message)}"
        case TimeoutError():
            return "timed out"
        case socket.gaierror():
            return "the host name cannot be resolved"
        case httptools.HttpParserError() | httptools.HttpParserUpgrade():
            return "the response is not HTTP"
    # asyncio's own texts name every address that it tried.
    if number := re.search(r"\[Errno (\d+)\]", str(error)):
        return os.strerror(int(number[1]))
    return escaped(str(error)) or type(error).__name__


def _decoded(body: bytes, kind: type[Value]) -> Value:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WebhookdError(NOT_WEBHOOKD) from error
