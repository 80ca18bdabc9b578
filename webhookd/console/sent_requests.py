"""The requests of a delivery as they were sent, made again from what is stored. Pure.

Not stored: signatures, the endpoint's own headers, and the format that the endpoint had then.
"""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from webhookd import __version__
from webhookd.console.html import DECEPTIVE
from webhookd.outbound.signatures import standard_body

# Linux allows 128 KiB for an argument of a command. A longer body comes from a file.
MAX_BODY_IN_COMMAND_BYTES = 64 * 1024
BODY_FILE = "body.json"
_KEY = """$(printf %s "${secret#whsec_}" | base64 -d | od -An -v -tx1 | tr -d ' \\n')"""


class Header(NamedTuple):
    """A header as it was sent. Without a value it is not stored, and the note says so."""

    name: str
    value: str | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """What every attempt of a delivery sends."""

    url: str
    event_id: int
    event_type: str
    correlation_id: str | None
    body: bytes

    @property
    def is_large(self) -> bool:
        """Whether the command reads the body from a file."""
        return len(self.body) > MAX_BODY_IN_COMMAND_BYTES


def message_of(event: Mapping[str, Any], payload: str, endpoint: Mapping[str, Any]) -> SentMessage:
    """Return what a delivery sends, with the address and the format that its endpoint has now."""
    body = payload.encode()
    if endpoint["format"] == "standard":
        body = standard_body(event["event_type"], datetime.fromisoformat(event["created_at"]), body)
    return SentMessage(
        endpoint["callback_url"], event["id"], event["event_type"], event["correlation_id"], body
    )


def sent_at(attempt: Mapping[str, Any]) -> datetime | None:
    """Return about when an attempt was sent. Stored are when its result was reported, and its duration."""
    if attempt["finished_at"] is None or attempt["duration_ms"] is None:
        return None
    finished_at = datetime.fromisoformat(attempt["finished_at"])
    return finished_at - timedelta(milliseconds=attempt["duration_ms"])


def sent_headers(message: SentMessage, attempt: Mapping[str, Any]) -> Sequence[Header]:
    """Return the headers of an attempt, in the order in which they are sent."""
    at = sent_at(attempt)
    timestamp = Header("webhook-timestamp", None, "not known: there is no result")
    if at is not None:
        timestamp = Header("webhook-timestamp", str(int(at.timestamp())), "within a second or two")
    headers = [
        Header("host", urlsplit(attempt.get("callback_url") or message.url).netloc),
        Header("user-agent", f"webhookd/{__version__}", "or the version that ran then"),
        Header("content-type", "application/json"),
        Header("accept-encoding", "identity"),
        Header("accept", "*/*", "unless the endpoint's own headers have another"),
        Header("webhook-id", f"evt_{message.event_id}"),
        timestamp,
        Header("webhook-signature", None, "not stored"),
        Header("webhook-attempt", str(attempt["attempt"])),
        Header("webhook-event-type", message.event_type),
    ]
    if message.correlation_id is not None:
        headers.append(Header("webhook-correlation-id", message.correlation_id))
    return [*headers, Header("content-length", str(len(message.body)))]


def curl_script(message: SentMessage, attempt_number: int) -> str:
    """Return shell commands that sign and send the request again, once the endpoint's secret is filled in.

    Every value is quoted. Globbing of URLs is off, because an address may contain brackets.
    """
    message_id = f"evt_{message.event_id}"
    headers = [
        "content-type: application/json",
        f"user-agent: webhookd/{__version__}",
        f"webhook-id: {message_id}",
        f"webhook-attempt: {attempt_number}",
        f"webhook-event-type: {message.event_type}",
    ]
    if message.correlation_id is not None:
        headers.append(f"webhook-correlation-id: {message.correlation_id}")
    if message.is_large:
        signed = f"{{ printf '{message_id}.%s.' \"$timestamp\"; cat {BODY_FILE}; }}"
        body_lines: list[str] = []
        data = f"--data-binary @{BODY_FILE}"
    else:
        signed = f"""printf '{message_id}.%s.%s' "$timestamp" "$body\""""
        body_lines = [f"body={_quoted_body(message.body)}"]
        data = '--data-raw "$body"'
    sign = f"""openssl dgst -sha256 -mac HMAC -macopt "hexkey:{_KEY}" -binary | base64"""
    options = [f"  --header {shlex.quote(line)} \\" for line in headers]
    return "\n".join(
        [
            "secret='whsec_...'  # the secret of the endpoint",
            *body_lines,
            "timestamp=$(date +%s)",
            f"signature=$({signed} |",
            f"  {sign})",
            f"curl --globoff --include --request POST {shlex.quote(message.url)} \\",
            *options,
            '  --header "webhook-timestamp: $timestamp" \\',
            '  --header "webhook-signature: v1,$signature" \\',
            f"  {data}",
        ]
    )


def _quoted_body(body: bytes) -> str:
    """Quote the body. Characters that a terminal might interpret, or that deceive readers, are encoded."""
    text = body.decode()
    if DECEPTIVE.search(text) or "\t" in text:
        return f"$(printf %s {base64.b64encode(body).decode()} | base64 -d)"
    return shlex.quote(text)
