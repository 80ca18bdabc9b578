"""What a command asks a running daemon, over its HTTP API; and the options that say which, and who asks.

No proxy, no redirect; a deadline on each request and a bound on each answer. What is refused is raised.
"""

import contextlib
import functools
import http.client
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, urlencode, urlsplit

import click
import msgspec

from webhookd import __version__
from webhookd.cli.answers import Answer, Page, decoded, in_words, read_body
from webhookd.cli.files import read_bounded
from webhookd.cli.text import escaped
from webhookd.core.configuration import load_settings
from webhookd.core.errors import ConfigurationError, RequestRefused, ServiceUnavailable, WebhookdError
from webhookd.core.settings import host_and_port

CONNECT_TIMEOUT_SECONDS = 5.0
ANSWER_TIMEOUT_SECONDS = 30.0
MAX_TOKEN_BYTES = 4096
PAGE_SIZE = 500

_FIRST_ERROR = 300
_UNAUTHORIZED = 401
_UNAVAILABLE = (502, 503, 504)
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  where to ask what listens everywhere


class Place(NamedTuple):
    """Where a daemon should be, and who said so."""

    url: SplitResult
    said_by: str

    def __str__(self) -> str:
        return f"{self.url.geturl()} ({self.said_by})"


class Client:
    """Asks one daemon; a connection for each request, for there are few and it may restart in between.

    Threads may share it.
    """

    def __init__(self, place: Place, token: str | None = None, ca_file: Path | None = None) -> None:
        self.place: Final = place
        self._token = token
        self._tls = _tls_context(ca_file) if place.url.scheme == "https" else None
        self._waiting: set[http.client.HTTPConnection] = set()
        self._abandoned = False

    def get(self, path: str, query: Mapping[str, object] | None = None) -> Answer:
        return self._ask("GET", path + _query(query or {}))

    def post(
        self, path: str, value: object = None, *, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS
    ) -> Answer:
        """Post a value as JSON. A msgspec.Raw in it goes out as the bytes it is."""
        return self._ask("POST", path, value, timeout_seconds)

    def wait(self, path: str, value: object, timeout_seconds: float) -> Answer:
        """Post, and wait for an answer that may take its time; `abandon` ends the waiting."""
        return self._ask("POST", path, value, timeout_seconds, self._waiting)

    def abandon(self) -> None:
        """End what waits, now and from now on, with ServiceUnavailable; the daemon notices it."""
        self._abandoned = True
        for connection in tuple(self._waiting):
            with contextlib.suppress(OSError, AttributeError):  # ended this moment
                connection.sock.shutdown(socket.SHUT_RDWR)

    def patch(self, path: str, value: object) -> Answer:
        return self._ask("PATCH", path, value)

    def rows(
        self, path: str, query: Mapping[str, object] | None = None, limit: int | None = None
    ) -> Iterator[msgspec.Raw]:
        """The rows of a list, page after page, each asked for when the one before is used up."""
        left = limit
        asked = dict(query or {})
        while left is None or left > 0:
            page_size = PAGE_SIZE if left is None else min(left, PAGE_SIZE)
            page = decoded(self.get(path, asked | {"limit": page_size}).body, Page)
            yield from page.items
            if page.next_cursor is None:
                return
            asked["cursor"] = page.next_cursor
            left = None if left is None else left - len(page.items)

    def _ask(
        self,
        method: str,
        path: str,
        value: object = None,
        timeout_seconds: float = ANSWER_TIMEOUT_SECONDS,
        among: set[http.client.HTTPConnection] | None = None,
    ) -> Answer:
        body = None if value is None else msgspec.json.encode(value)
        connection = self._connected()
        deadline = time.monotonic() + timeout_seconds
        connection.sock.settimeout(timeout_seconds)
        open_ones = set() if among is None else among
        open_ones.add(connection)
        try:
            if (
                self._abandoned and among is not None
            ):  # looked at after it was added: one of both sees the other
                raise ConnectionAbortedError("abandoned")
            connection.request(method, self.place.url.path.rstrip("/") + path, body, self._headers())
            response = connection.getresponse()
            answer = read_body(response, deadline)
        except (OSError, http.client.HTTPException) as error:
            effect = "" if method == "GET" else "; whether the request took effect is not known"
            raise ServiceUnavailable(
                f"no answer from the daemon at {self.place}: {in_words(error)}{effect}"
            ) from error
        finally:
            open_ones.discard(connection)
            connection.close()
        if response.status >= _FIRST_ERROR:
            raise self._refused(response.status, answer)
        return Answer(answer)

    def _connected(self) -> http.client.HTTPConnection:
        host, port = self.place.url.hostname or "", self.place.url.port
        connection = (
            http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_SECONDS)
            if self._tls is None
            else http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_SECONDS, context=self._tls)
        )
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that is no name
            connection.close()
            raise ServiceUnavailable(
                f"no daemon at {self.place}: {in_words(error)}; start one with `webhookd serve`, "
                "or say where it is with --url or WEBHOOKD_URL"
            ) from error
        return connection

    def _headers(self) -> dict[str, str]:
        headers = {
            "Accept": "application/json",
            "Connection": "close",
            "Content-Type": "application/json",
            "User-Agent": f"webhookd/{__version__}",
        }
        return headers if self._token is None else headers | {"Authorization": f"Bearer {self._token}"}

    def _refused(self, status: int, body: bytes) -> WebhookdError:
        try:
            problem = msgspec.json.decode(body, type=dict[str, Any])
            code, detail = escaped(problem["code"]), escaped(problem["detail"])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
            problem, code, detail = {}, f"HTTP {status}", "what is there does not answer as webhookd does"
        if status in _UNAVAILABLE:
            return ServiceUnavailable(f"the daemon at {self.place} cannot do it now: {detail} ({code})")
        if status == _UNAUTHORIZED:
            how = "WEBHOOKD_TOKEN, or --token-file FILE"
            detail = (
                f"the daemon asks for a token, and none is set: {how}"
                if self._token is None
                else f"the daemon does not know this token (from {how})"
            )
        return RequestRefused(f"{detail} ({code})", status, code, problem)


def asks_daemon(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which daemon is asked; its first argument is then a Client."""

    @click.option("--url", metavar="URL", help="Where the daemon is (default: $WEBHOOKD_URL, or api.listen).")
    @click.option(
        "--token-file",
        metavar="FILE",
        help="Read the token from this file, or from - for stdin (default: $WEBHOOKD_TOKEN).",
    )
    @click.option(
        "--ca-file",
        type=click.Path(path_type=Path),
        help="Authorities to trust for an https URL, beside the system's.",
    )
    @click.option("--token", hidden=True, expose_value=False, callback=_refuse_secret)
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
        except (
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # another version's members
            raise unexpected(client, error) from error

    return wrapped


def unexpected(client: Client, error: Exception) -> WebhookdError:
    """An answer has not the members that it should have."""
    return WebhookdError(
        f"{client.place} answers with other things than this webhookd {__version__} expects: {error}"
    )


def find_daemon(url: str | None, config_path: Path | None) -> Place:
    """By the option, else by the environment, else by the configuration."""
    for given, said_by in ((url, "--url"), (os.environ.get("WEBHOOKD_URL"), "WEBHOOKD_URL")):
        if given:
            return Place(_parsed(given, said_by), said_by)
    try:
        settings = load_settings(config_path, os.environ)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (--url says where the daemon is without it)") from error
    host, port = host_and_port(settings.api.listen)
    host = _EVERYWHERE.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return Place(urlsplit(f"http://{shown}:{port}"), "api.listen of the configuration")


def _parsed(text: str, said_by: str) -> SplitResult:
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and url.hostname and (url.port is None or url.port > 0)
    except ValueError:
        usable = False
    if not usable or not text.isascii() or not text.isprintable() or " " in text:
        raise click.UsageError(f"{said_by}: {escaped(text)!s} is no URL such as http://127.0.0.1:8470")
    if url.username is not None or url.query or url.fragment:
        raise click.UsageError(f"{said_by}: only a scheme, a host, a port and a path belong there")
    return url


def _refuse_secret(_: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"--{parameter.name}: every user of this machine can see arguments; "
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
        where = "WEBHOOKD_TOKEN" if file is None else f"--token-file: {file}"
        raise click.UsageError(f"{where} is no token: it has more than printable ASCII in it")
    return token or None


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:
            raise click.UsageError(f"--ca-file: {ca_file} cannot be used: {in_words(error)}") from error
    return context


def _query(query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""
