"""`webhookd listen`: a receiver on this machine that subscribes itself, and verifies and shows what comes."""

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import INTERRUPTED, example, json_option, read_bounded
from webhookd.core.configuration import data_dir, load_settings
from webhookd.core.errors import CannotListen
from webhookd.core.limits import HIGHEST_PORT
from webhookd.devtools import arrivals
from webhookd.devtools.inbox import Arrival, Behaviour, Inbox
from webhookd.devtools.receiver import receiving
from webhookd.devtools.subscribing import Subscriber
from webhookd.http.server import listening_socket
from webhookd.local_certificate import LocalCertificate
from webhookd.outbound.signatures import sign

# Always the same, so that the subscription of the last time fits again.
DEFAULT_PORT = 8471
MAX_SECRET_BYTES = 4096
# What nobody can publish.
RESERVED = "dot.job."
SECRET_VARIABLE = "WEBHOOKD_SECRET"  # noqa: S105  the name of one


@dataclass(frozen=True)
class Listening:
    """What was asked for."""

    event_types: Sequence[str]
    port: int
    delay_seconds: float
    keep: bool
    as_json: bool


def _refuse_secret(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"--secret: every user of this machine can see arguments; set {SECRET_VARIABLE}, "
            "or use --secret-file FILE"
        )


@click.command(
    "listen",
    epilog=example("webhookd listen order.created", "webhookd listen order.created --fail 2 --status 503"),
)
@click.argument("event_types", metavar="[EVENT_TYPE]...", nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(0, HIGHEST_PORT),
    default=DEFAULT_PORT,
    show_default=True,
    help="The port on 127.0.0.1; 0 takes a free one.",
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
    help="What a failure is answered with (default: 500); without --fail, everything is.",
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
    help=f"Further secrets to verify by, one a line, - for stdin (default: ${SECRET_VARIABLE}).",
)
@click.option("--secret", hidden=True, expose_value=False, callback=_refuse_secret)
@click.option("--keep", is_flag=True, help="Leave the subscriptions active at the end.")
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
    *,
    keep: bool,
    as_json: bool,
) -> None:
    """Receive webhooks on this machine, over HTTPS, and show them.

    With event types it subscribes to them itself at the daemon, which must run as `webhookd serve --local`,
    verifies every signature, and pauses its subscriptions when Ctrl-C ends it. The next `listen` on the same
    port takes them up again, with new secrets and what was still on its way. Retries come after 1, 2, 4 …
    seconds.

    Without event types it only receives: what any sender sends to the URL that it prints.
    """
    if math.isnan(delay_seconds):
        raise click.UsageError("--delay: nan is no time")
    logging.basicConfig(format="webhookd: %(message)s", level=logging.WARNING)
    # It tells of every connection that breaks, with a traceback.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    secrets = _secrets(secret_file)
    inbox = Inbox(bool(event_types or secrets), secrets, Behaviour(failures=failures, status=status))
    asked = Listening(tuple(dict.fromkeys(event_types)), port, delay_seconds, keep, as_json)
    config_path = click.get_current_context().find_object(Path)
    certificate = LocalCertificate.in_folder(data_dir(load_settings(config_path, os.environ)))
    if not asyncio.run(_listen(asked, client, certificate, inbox)):
        sys.exit(INTERRUPTED)


async def _listen(asked: Listening, client: Client, certificate: LocalCertificate, inbox: Inbox) -> bool:
    """Until told to stop; whether it was ready by then."""
    try:
        listening = listening_socket(f"127.0.0.1:{asked.port}")
    except CannotListen as error:
        raise CannotListen(f"{error} --port chooses another one") from error
    told = _told_to_stop()

    def show(arrival: Arrival) -> None:
        try:
            _show(arrival, as_json=asked.as_json)
        except BrokenPipeError:
            told.set()  # nobody reads any more

    async with receiving(listening, certificate.server_tls(), inbox, show, asked.delay_seconds) as url:
        _say(f"Listening on {url} (Ctrl-C ends it)")
        subscriber = Subscriber(client, url)
        try:
            ready = await _subscribe(asked, subscriber, inbox, told)
            if ready:
                _say_what_now(asked, inbox, certificate)
                await told.wait()
        finally:
            if subscriber.subscription_ids and not asked.keep:
                await asyncio.to_thread(subscriber.pause)
                _say(f"Paused {_named(subscriber.subscription_ids)}: `listen` on this port takes up again.")
    return ready


def _told_to_stop() -> asyncio.Event:
    """Ctrl-C is the ordinary end: what was begun is ended in order. A second one ends at once."""
    told = asyncio.Event()

    def stop() -> None:
        if told.is_set():
            os._exit(INTERRUPTED)
        told.set()

    for order in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(order, stop)
    return told


async def _subscribe(asked: Listening, subscriber: Subscriber, inbox: Inbox, told: asyncio.Event) -> bool:
    """Whether it came to the end: each question to the daemon ends by itself, and between two it may stop."""
    for event_type in asked.event_types:
        if told.is_set():
            return False
        inbox.secrets.append(await asyncio.to_thread(subscriber.subscribe, event_type))
        await asyncio.to_thread(subscriber.verify)
        _say(f"Subscribed to {event_type}: {_named(subscriber.subscription_ids[-1:])}, verified")
    return True


def _say_what_now(asked: Listening, inbox: Inbox, certificate: LocalCertificate) -> None:
    if asked.event_types:
        anybodys = [one for one in asked.event_types if not one.startswith(RESERVED)]
        if anybodys:
            _say(f"Now, elsewhere: webhookd publish {anybodys[0]} '{{\"order\": 7}}'")
        else:
            _say("Now, elsewhere: webhookd jobs enqueue greet")
            _say(
                f"({RESERVED}… is webhookd's own word, as jobs move; `webhookd jobs enable` switches them on)"
            )
        return
    _say(f"Senders must trust the authority in {certificate.certificate_file}")
    if not inbox.verifies:
        _say("Nothing is verified: for that, name event types, or give a subscription's secret")


def _show(arrival: Arrival, *, as_json: bool) -> None:
    if as_json:
        output.show_json(arrivals.as_json(arrival))
    else:
        output.show(arrivals.as_text(arrival))


def _secrets(file: str | None) -> list[str]:
    """Of the file, else of the environment; one that cannot sign is refused now."""
    text, where = os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE
    if file is not None:
        where = f"--secret-file: {file}"
        text = read_bounded(file, "--secret-file", MAX_SECRET_BYTES).decode("ascii", "replace")
    secrets = text.split()
    try:
        sign(secrets, "", 0, b"")
    except ValueError as error:
        raise click.UsageError(f"{where} has what is no secret: they begin with whsec_") from error
    if file is not None and not secrets:
        raise click.UsageError(f"{where} is empty")
    return secrets


def _named(subscription_ids: Sequence[int]) -> str:
    return f"subscription {', '.join(map(str, subscription_ids))}"


def _say(line: str) -> None:
    """Beside what arrives, which alone is on stdout."""
    click.echo(line, err=True)
