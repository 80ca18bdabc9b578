"""`publish --batch`: lines of events in, requests of at most a thousand out; memory has a bound.

The lines before a refused request are published, those after it are not, and the summary says which.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO, Any

import click
import msgspec
from rich.progress import Progress

from webhookd.cli import output
from webhookd.cli.client import Client
from webhookd.core.errors import RequestRefused, WebhookdError
from webhookd.core.limits import MAX_BATCH_EVENTS

# Below the daemon's default bound of a body; a daemon that takes less says so, and gets halves.
MAX_BODY_BYTES = 900_000
MAX_LINE_BYTES = 9 * 1024 * 1024
TOO_LARGE = 413


class Published:
    """How far it came."""

    def __init__(self) -> None:
        self.events = 0
        self.duplicates = 0
        self.last_line = 0

    def summary(self) -> str:
        if not self.events:
            return "published nothing"
        some = f", {self.duplicates} of them duplicates" if self.duplicates else ""
        return f"published {self.events} events{some}, to line {self.last_line}"


class Line(msgspec.Struct):
    """An event as it stands in the file."""

    number: int
    event: msgspec.Raw


def publish_batch(client: Client, name: str, *, as_json: bool) -> None:
    """Publish a file, and say how far it came, also if it broke off."""
    done = Published()
    try:
        with _opened(name) as stream, output.progress(None, "events") as progress:
            for lines in _requests(stream):
                _publish(client, lines, done, progress, as_json=as_json)
    finally:
        if not as_json:
            click.echo(done.summary())


def _opened(name: str) -> AbstractContextManager[IO[bytes]]:
    try:
        return click.open_file(name, "rb")
    except OSError as error:
        raise click.UsageError(f"--batch: {name} cannot be read: {error.strerror}") from error


def _next(stream: IO[bytes]) -> bytes:
    try:
        return stream.readline(MAX_LINE_BYTES + 1)
    except OSError as error:  # a directory, or a disk that fails
        raise click.UsageError(f"--batch: it cannot be read: {error.strerror}") from error


def _requests(stream: IO[bytes]) -> Iterator[list[Line]]:
    """Lines that go together."""
    together: list[Line] = []
    size_bytes = 0
    for line in _lines(stream):
        length = len(bytes(line.event))
        if together and (len(together) == MAX_BATCH_EVENTS or size_bytes + length > MAX_BODY_BYTES):
            yield together
            together, size_bytes = [], 0
        together.append(line)
        size_bytes += length
    if together:
        yield together


def _lines(stream: IO[bytes]) -> Iterator[Line]:
    """Each is checked to be one JSON value, for it goes into a body with others as it is."""
    number = 0
    while text := _next(stream):
        number += 1
        if len(text) > MAX_LINE_BYTES:
            raise WebhookdError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
        if not text.strip():
            continue
        try:
            yield Line(number, msgspec.json.decode(text, type=msgspec.Raw))
        except (msgspec.DecodeError, RecursionError) as error:
            raise WebhookdError(f"line {number} is not JSON: {error}") from error


def _publish(
    client: Client, lines: list[Line], done: Published, progress: Progress, *, as_json: bool
) -> None:
    try:
        answer = client.post("/v1/events/batch", {"events": [line.event for line in lines]})
    except RequestRefused as refused:
        if refused.status == TOO_LARGE and len(lines) > 1:
            middle = len(lines) // 2
            _publish(client, lines[:middle], done, progress, as_json=as_json)
            _publish(client, lines[middle:], done, progress, as_json=as_json)
            return
        raise WebhookdError(f"lines {lines[0].number} to {lines[-1].number}: {refused}") from refused
    accepted: list[dict[str, Any]] = answer.value["events"]
    done.events += len(accepted)
    done.duplicates += sum(event["duplicate"] for event in accepted)
    done.last_line = lines[-1].number
    progress.advance(progress.task_ids[0], len(accepted))
    if as_json:
        for event in accepted:
            output.show_json(msgspec.json.encode(event))
