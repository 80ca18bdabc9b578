"""Standard Webhooks 1.0: signing and verifying messages, and the verification challenge. Pure functions."""

import binascii
import hmac
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache

import msgspec

SECRET_PREFIX = "whsec_"  # noqa: S105 - a prefix, not a secret
# The clock difference that the specification allows; an older message counts as a replay.
TOLERANCE_SECONDS = 300
_TIMESTAMP = re.compile(r"[0-9]{1,12}")
CHALLENGE_EVENT_TYPE = "webhookd.verification"


class SignatureProblem(StrEnum):
    """Why a message must be rejected, as text for people."""

    NOT_SIGNED = "not signed: webhook-id, webhook-timestamp or webhook-signature is missing"
    NO_TIMESTAMP = "webhook-timestamp is not a Unix time"
    TOO_OLD = "signed more than 5 minutes ago"
    TOO_NEW = "signed more than 5 minutes in the future"
    NO_MATCH = "no signature matches: wrong secret, or the message was changed"


def sign(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """Make the value of `webhook-signature`: one `v1,…` per secret, in the order given (newest first)."""
    # Our own ids are ASCII, but a received header, when verifying, may hold any bytes.
    signed = b"%s.%d.%s" % (message_id.encode("utf-8", "surrogateescape"), timestamp, body)
    return " ".join([_signature(secret, signed) for secret in secrets])


def standard_body(event_type: str, created_at: datetime, payload: bytes) -> bytes:
    """Make the body of the format `standard`, as webhookd.standard_body() makes that of a delivery."""
    timestamp = created_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return b'{"type":"%s","timestamp":"%s","data":%s}' % (event_type.encode(), timestamp.encode(), payload)


def verify(
    secrets: Sequence[str], headers: Mapping[str, str], body: bytes, now: float
) -> SignatureProblem | None:
    """Check a received message; None if it is authentic. Header names are in lower case.

    One matching secret is enough: a receiver may serve several subscriptions, or a secret may be rotating.
    """
    message_id, timestamp_text, given = (
        headers.get(f"webhook-{name}", "") for name in ("id", "timestamp", "signature")
    )
    if not (message_id and timestamp_text and given):
        return SignatureProblem.NOT_SIGNED
    if not _TIMESTAMP.fullmatch(timestamp_text):
        return SignatureProblem.NO_TIMESTAMP
    timestamp = int(timestamp_text)
    if timestamp < now - TOLERANCE_SECONDS:
        return SignatureProblem.TOO_OLD
    if timestamp > now + TOLERANCE_SECONDS:
        return SignatureProblem.TOO_NEW
    signatures = [signature.encode("utf-8", "surrogateescape") for signature in given.split(" ")]
    expected = [
        signature.encode() for signature in sign(secrets, message_id, timestamp, body).split(" ") if signature
    ]
    # Compare every pair, each in constant time, so that timing reveals nothing about a guess.
    matches = [hmac.compare_digest(ours, theirs) for ours in expected for theirs in signatures]
    return None if any(matches) else SignatureProblem.NO_MATCH


class ChallengeMessage(msgspec.Struct, tag_field="type", tag=CHALLENGE_EVENT_TYPE):
    """`{"type": "webhookd.verification", "challenge": "…"}`; the endpoint must echo the challenge."""

    challenge: str


def challenge_in(body: bytes) -> str | None:
    """Read the challenge from a message; None if it is not a challenge."""
    try:
        return msgspec.json.decode(body, type=ChallengeMessage).challenge
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _signature(secret: str, signed: bytes) -> str:
    mac = _mac(secret).copy()
    mac.update(signed)
    return f"v1,{binascii.b2a_base64(mac.digest(), newline=False).decode('ascii')}"


@lru_cache(maxsize=1024)  # sign() takes 2.3 µs for 400 bytes; without it 3.4 µs
def _mac(secret: str) -> hmac.HMAC:
    if not secret.startswith(SECRET_PREFIX):
        raise ValueError(f"a signing secret must start with {SECRET_PREFIX}")
    return hmac.new(binascii.a2b_base64(secret[len(SECRET_PREFIX) :], strict_mode=True), digestmod="sha256")
