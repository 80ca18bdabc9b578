"""`webhookd listen`: a receiver on this machine that subscribes itself, verifies each request and shows it.

A receiver finds its own subscription again by URL and description, so there is one for each URL and tenant
however often it starts. A secret is shown only once, so each start rotates it.
"""

import asyncio
import logging
import math
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import click
import msgspec
from rich.highlighter import JSONHighlighter
from rich.text import Text

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import INTERRUPTED, escaped, example, json_option, read_bounded
from webhookd.cli.output import excerpt
from webhookd.core.configuration import data_dir, load_settings
from webhookd.core.errors import RequestRefused, ServiceUnavailable, WebhookdError
from webhookd.core.limits import HIGHEST_PORT
from webhookd.devtools.processes import SIGNALS
from webhookd.devtools.receiver import Arrival, ReceivedWebhooks, receiving
from webhookd.local_certificate import LocalCertificate
from webhookd.outbound.endpoint import EndpointCode
from webhookd.outbound.outcome import Failure
from webhookd.outbound.signatures import sign

# Fixed, so that the subscription of the last start fits again.
DEFAULT_PORT = 8471
MAX_SECRET_BYTES = 4096
# Event types that only webhookd itself publishes.
RESERVED = "dot.job."
SECRET_VARIABLE = "WEBHOOKD_SECRET"  # noqa: S105  the name of the variable, not a secret
# Marks the subscriptions of `listen`: it must not rotate the secret of any other subscription.
DESCRIPTION = "webhookd listen"
# A person waits for the retry; the daemon's default delay is meant for endpoints that are down.
BASE_DELAY_SECONDS = 1.0
# Subscriptions to this URL to search; if there are more, a new one is created.
MAX_SEARCHED = 5000
# Of the application that `--forward` names.
FORWARD_TIMEOUT_SECONDS = 30.0
MAX_FORWARDED_ANSWER_BYTES = 64 * 1024
# Headers of a connection, not of a message.
HOP_HEADERS = frozenset({"connection", "content-length", "host", "keep-alive", "te", "transfer-encoding"})
# Limits of the text form; --json shows the whole payload.
MAX_SHOWN_LINES = 30
MAX_SHOWN_CHARACTERS = 3000
MAX_WORD_CHARACTERS = 100
# A larger payload is not indented: a thousand levels of nesting would make megabytes of 64 kB.
MAX_INDENTED_BYTES = 64 * 1024

_NOT_LOCAL = "the daemon does not deliver to this machine: start it with `webhookd serve --local`"
_NOT_TRUSTED = (
    "the daemon does not trust this machine's local certificate: restart it with `webhookd serve --local`,"
    " as the same user or with the same [database] data_dir"
)


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    event_types: Sequence[str]
    port: int
    delay_seconds: float
    keep: bool
    as_json: bool
    tenant: str | None
    forward_url: str | None


def http_url(text: str) -> str:
    """Parse the URL of an application."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        valid = False
    if not valid:
        raise click.BadParameter(f"{escaped(text)} is not an http:// or https:// address")
    return text


def _refuse_secret(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"--secret: every user of this machine can see arguments; set {SECRET_VARIABLE}, "
            "or use --secret-file FILE"
        )


@click.command(
    "listen",
    epilog=example(
        "webhookd listen order.created",
        "webhookd listen 'order.*' invoice.paid --forward http://127.0.0.1:8000/hook",
        "webhookd listen order.created --fail 2 --status 503",
    ),
)
@click.argument("event_types", metavar="[EVENT_TYPE]...", nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(0, HIGHEST_PORT),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port on 127.0.0.1; 0 picks a free port.",
)
@click.option(
    "--fail",
    "failures",
    type=click.IntRange(0, 1000),
    default=0,
    metavar="N",
    help="Fail the first N attempts of each event, to see retries.",
)
@click.option(
    "--status",
    type=click.IntRange(200, 599),
    metavar="CODE",
    help="Status of a failure (default: 500). Without --fail, the answer to every request.",
)
@click.option(
    "--delay",
    "delay_seconds",
    type=click.FloatRange(0, 3600),
    default=0.0,
    metavar="SECONDS",
    help="Wait this long before each answer.",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    help=f"Additional secrets to verify with, one per line; - is stdin (default: ${SECRET_VARIABLE}).",
)
@click.option("--secret", hidden=True, expose_value=False, callback=_refuse_secret)
@click.option("--tenant", help="Subscribe to the events of this tenant.")
@click.option(
    "--forward",
    "forward_url",
    metavar="URL",
    type=http_url,
    help="Pass each verified webhook on to this application, and answer what it answers.",
)
@click.option("--keep", is_flag=True, help="Leave the subscription enabled at the end.")
@json_option
@asks_daemon
def command(
    client: Client,
    event_types: Sequence[str],
    port: int,
    failures: int,
    status: int | None,
    delay_seconds: float,
    secret_file: str | None,
    tenant: str | None,
    forward_url: str | None,
    *,
    keep: bool,
    as_json: bool,
) -> None:
    """Receive webhooks on this machine over HTTPS, and show them.

    With event types or patterns, it subscribes to them at the daemon, which must run as `webhookd serve
    --local`, and verifies every signature. Ctrl-C stops it and disables its subscription. The next `listen`
    on the same port enables it with a new secret, and receives the deliveries that are still pending. Retries
    come after 1, 2, 4 … seconds.

    Without event types, it only receives: it shows every request to the URL that it prints.
    """
    if math.isnan(delay_seconds):
        raise click.UsageError("--delay: nan is not a number of seconds")
    logging.basicConfig(format="webhookd: %(message)s", level=logging.WARNING)
    # aiohttp logs a traceback for every broken connection.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    secrets = _secrets(secret_file)
    received = ReceivedWebhooks(bool(event_types or secrets), secrets, failures, status)
    types = tuple(dict.fromkeys(event_types))
    options = Options(types, port, delay_seconds, keep, as_json, tenant, forward_url)
    config_path = click.get_current_context().find_object(Path)
    certificate = LocalCertificate.in_folder(data_dir(load_settings(config_path, os.environ)))
    if not asyncio.run(_listen(options, client, certificate, received)):
        sys.exit(INTERRUPTED)


async def _listen(
    options: Options, client: Client, certificate: LocalCertificate, received: ReceivedWebhooks
) -> bool:
    """Receive until a signal arrives. Returns whether the subscription was ready by then."""
    stopping = _stop_on_signal()

    def show(arrival: Arrival) -> None:
        try:
            if options.as_json:
                output.show_json(_as_json(arrival))
            else:
                output.show(_as_text(arrival))
        except BrokenPipeError:
            stopping.set()  # the reader of stdout has gone

    tls = certificate.server_tls()
    async with AsyncExitStack() as stack:
        forward = None
        if options.forward_url is not None:
            forward = (await stack.enter_async_context(Forwarder(options.forward_url))).forward
        receiver = receiving(options.port, tls, received, show, options.delay_seconds, forward)
        url = await stack.enter_async_context(receiver)
        _say(f"Listening on {url} (Ctrl-C stops)")
        subscriber = Subscriber(client, url, received.secrets, options.tenant)
        try:
            if options.event_types:
                await subscriber.subscribe(options.event_types)
            if stopping.is_set():
                return False
            _say_next_step(options, received, certificate)
            await stopping.wait()
        finally:
            if subscriber.subscription_id is not None and not options.keep:
                await subscriber.disable()
    return True


class Forwarder:
    """Passes webhooks on to an application on this machine."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=FORWARD_TIMEOUT_SECONDS), auto_decompress=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def forward(self, arrival: Arrival) -> tuple[int, bytes]:
        """Send the request as it came, and return the answer; 502, so that it is retried, if that fails."""
        headers = {name: value for name, value in arrival.headers.items() if name not in HOP_HEADERS}
        try:
            async with self._session.post(
                self._url, data=arrival.body, headers=headers, allow_redirects=False
            ) as response:
                return response.status, await response.content.read(MAX_FORWARDED_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _say(f"cannot forward to {self._url}: {str(error) or type(error).__name__}")
            return HTTPStatus.BAD_GATEWAY, b""


def _stop_on_signal() -> asyncio.Event:
    """Set by the first signal, for an orderly end. A second signal exits at once."""
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            os._exit(INTERRUPTED)
        stopping.set()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return stopping


def _say_next_step(options: Options, received: ReceivedWebhooks, certificate: LocalCertificate) -> None:
    if options.event_types:
        publishable = [it for it in options.event_types if not it.startswith(RESERVED)]
        if publishable:
            event_type = publishable[0].replace("*", "test")
            tenant = f" --tenant {options.tenant}" if options.tenant else ""
            _say(f"Next, in another terminal: webhookd publish {event_type} '{{\"order\": 7}}'{tenant}")
        else:
            _say("Next, in another terminal: webhookd jobs enqueue greet")
            queue = f"The job queue publishes {RESERVED}… events"
            _say(f"({queue}; `webhookd jobs enable` switches the queue on.)")
        return
    _say(f"Ready. Senders must trust the certificate {certificate.certificate_file}")
    if not received.verifies:
        _say("Signatures are not verified: name event types, or provide a subscription's secret")


def _secrets(file: str | None) -> list[str]:
    """Read the secrets from the file, or from the environment; refuse any that cannot sign."""
    text, source = os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE
    if file is not None:
        source = f"--secret-file: {file}"
        text = read_bounded(file, "--secret-file", MAX_SECRET_BYTES).decode("ascii", "replace")
    secrets = text.split()
    try:
        sign(secrets, "", 0, b"")
    except ValueError as error:
        raise click.UsageError(f"{source} contains an invalid secret: secrets start with whsec_") from error
    if file is not None and not secrets:
        raise click.UsageError(f"{source} is empty")
    return secrets


@dataclass
class Subscriber:
    """Subscribes one URL, and remembers which subscription to disable at the end."""

    client: Client
    url: str
    secrets: list[str]  # of the receiver, which verifies the challenge too
    tenant: str | None = None
    subscription_id: int | None = None

    async def subscribe(self, event_types: Sequence[str]) -> None:
        """Create a subscription or reuse our earlier one; then verify and enable it."""
        self.subscription_id = await self._find()
        if self.subscription_id is None:
            request = {
                "event_types": event_types,
                "callback_url": self.url,
                "base_delay_seconds": BASE_DELAY_SECONDS,
                "description": DESCRIPTION,
            }
            answer = await self._post(
                "/v1/subscriptions", request | ({"tenant": self.tenant} if self.tenant else {})
            )
            self.subscription_id = answer["id"]
        else:
            answer = await self._post(f"{self._path}/rotate-secret")
        self.secrets.append(answer["secret"])
        await self._post(f"{self._path}/verify")
        changes = {"event_types": event_types, "active": True, "paused": False}
        await self.client.request("PATCH", self._path, changes)
        _say(f"Subscribed to {', '.join(event_types)}: subscription {self.subscription_id}, verified")

    async def disable(self) -> None:
        """Disable the subscription, so that no delivery fails while nothing receives it."""
        try:
            await self.client.request("PATCH", self._path, {"active": False})
        except WebhookdError as error:
            raise ServiceUnavailable(
                f"subscription {self.subscription_id} could not be disabled: {error}"
            ) from error
        _say(f"Disabled subscription {self.subscription_id}. `listen` on the same port enables it.")

    @property
    def _path(self) -> str:
        return f"/v1/subscriptions/{self.subscription_id}"

    async def _find(self) -> int | None:
        query = {"search": self.url} | ({"tenant": self.tenant} if self.tenant else {})
        async for page in self.client.pages("/v1/subscriptions", query, MAX_SEARCHED):
            for row in page:
                found = msgspec.json.decode(row, type=dict[str, Any])
                if (found["callback_url"], found["description"], found["tenant"]) == (
                    self.url,
                    DESCRIPTION,
                    self.tenant or "",
                ):
                    return int(found["id"])
        return None

    async def _post(self, path: str, value: object = None) -> Any:
        try:
            return (await self.client.request("POST", path, value)).value
        except RequestRefused as refused:
            raise _explained(refused) from refused


def _explained(refused: RequestRefused) -> WebhookdError:
    """Say what to do about a refusal, where that is known."""
    error_code = refused.members.get("error_code")
    not_local = refused.code in (EndpointCode.BLOCKED_ADDRESS, EndpointCode.HOST)
    if not_local or error_code == Failure.ADDRESS_BLOCKED:
        return WebhookdError(_NOT_LOCAL)
    if error_code == Failure.TLS_FAILED:
        return WebhookdError(_NOT_TRUSTED)
    if error_code == Failure.CONNECT_FAILED:
        return WebhookdError(
            f"the daemon cannot reach 127.0.0.1 of this machine: does it run on another one? ({refused})"
        )
    return refused


def _say(line: str) -> None:
    """Print to stderr: stdout has the arrivals only."""
    click.echo(line, err=True)


# How an arrival is shown. Any sender may have chosen its bytes, so text is escaped and shortened.


def _as_text(arrival: Arrival) -> Text:
    """One line with the headers and the answer, and the payload below it."""
    shown = Text.assemble(
        (f"{arrival.received_at.astimezone():%H:%M:%S} ", "dim"),
        _signature(arrival),
        (f" {_subject(arrival)}", "bold"),
    )
    for name, label in (("id", ""), ("attempt", "attempt "), ("correlation-id", "correlation ")):
        if value := _header(arrival, name):
            shown.append(f"  {_word(label + value)}", "dim")
    shown.append(f"  → {arrival.status}", "green" if arrival.accepted else "red")
    if arrival.duplicate:
        shown.append("  duplicate: already accepted", "yellow")
    if arrival.problem:
        shown.append(f"\n         {arrival.problem}", "red")
    if arrival.challenge is None and arrival.body:
        shown.append("\n").append_text(_payload(arrival.body))
    return shown


def _as_json(arrival: Arrival) -> bytes:
    """One line. A payload that is not JSON becomes a string."""
    payload = _formatted(arrival.body, -1)
    signature = "refused" if arrival.problem else "verified" if arrival.checked else "not_checked"
    return msgspec.json.encode(
        {
            "received_at": arrival.received_at,
            "method": arrival.method,
            "path": _valid(arrival.path),
            "event_type": _header(arrival, "event-type"),
            "webhook_id": _header(arrival, "id"),
            "attempt": _header(arrival, "attempt"),
            "correlation_id": _header(arrival, "correlation-id"),
            "signature": signature,
            "problem": arrival.problem,
            "duplicate": arrival.duplicate,
            "challenge": arrival.challenge is not None,
            "answered": arrival.status,
            "payload": arrival.body.decode("utf-8", "replace") if payload is None else msgspec.Raw(payload),
        }
    )


def _signature(arrival: Arrival) -> tuple[str, str]:
    if not arrival.checked:
        return "? not verified: no secret", "yellow"
    return ("✗ signature", "bold red") if arrival.problem else ("✓ signature", "bold green")


def _subject(arrival: Arrival) -> str:
    if arrival.challenge is not None:
        return "challenge"
    if arrival.method != "POST":
        return f"{_word(arrival.method)} {_word(arrival.path)}"
    return _word(_header(arrival, "event-type") or "POST without webhook-event-type")


def _header(arrival: Arrival, name: str) -> str | None:
    value = arrival.headers.get(f"webhook-{name}")
    return None if value is None else _valid(value)


def _valid(text: str) -> str:
    """Replace lone surrogates, which stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _word(text: str) -> str:
    return excerpt(text, MAX_WORD_CHARACTERS)


def _payload(body: bytes) -> Text:
    formatted = _formatted(body, 2) if len(body) <= MAX_INDENTED_BYTES else None
    text = (body if formatted is None else formatted)[: 4 * MAX_SHOWN_CHARACTERS].decode("utf-8", "replace")
    lines = text[:MAX_SHOWN_CHARACTERS].split("\n")
    shown = Text("\n".join(f"    {escaped(line)}" for line in islice(lines, MAX_SHOWN_LINES)))
    if formatted is not None:
        JSONHighlighter().highlight(shown)
    if len(text) > MAX_SHOWN_CHARACTERS or len(lines) > MAX_SHOWN_LINES:
        shown.append(f"\n    … {len(body):,} bytes in total", "dim")
    return shown


def _formatted(body: bytes, indent: int) -> bytes | None:
    """Indented JSON with every value as it was written; None if the body is not JSON."""
    try:
        body.decode()  # msgspec does not validate UTF-8 inside strings
        return msgspec.json.format(body, indent=indent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
