"""Standard Webhooks 1.0. Pure: secrets and a message in, the value of `webhook-signature` out; and back."""

import binascii
import hmac
from collections.abc import Mapping, Sequence
from enum import StrEnum

SECRET_PREFIX = "whsec_"  # noqa: S105 - what a secret begins with is none
# What the specification lets sender's and receiver's clocks differ by: older is taken for a replay.
TOLERANCE_SECONDS = 300
_MAX_TIMESTAMP_DIGITS = 12


class SignatureProblem(StrEnum):
    """Why a message must not be believed, in words for a person."""

    NOT_SIGNED = "not signed: webhook-id, webhook-timestamp or webhook-signature is missing"
    NO_TIMESTAMP = "webhook-timestamp is not a time"
    TOO_OLD = "signed more than 5 minutes ago"
    TOO_NEW = "signed more than 5 minutes in the future"
    NO_MATCH = "no signature is by our secret: another secret, or changed on its way"


def sign(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """One `v1,…` for each secret, in their order: newest first."""
    # One-shot, from the text each time: 2.9 µs for 400 bytes and 0.4 µs for the secret, where a copied,
    # precomputed HMAC takes 2.3 µs. Less than a hundredth of a POST, so no cache of keys to keep.
    # Of ours there is only ASCII; but a stranger's header, to be verified, may hold any bytes.
    signed = b"%s.%d.%s" % (message_id.encode("utf-8", "surrogateescape"), timestamp, body)
    return " ".join(f"v1,{_base64(hmac.digest(_key(secret), signed, 'sha256'))}" for secret in secrets)


def verify(
    secrets: Sequence[str], headers: Mapping[str, str], body: bytes, now: float
) -> SignatureProblem | None:
    """What a receiver must ask of every message: nothing is wrong, or this is. Header names in lower case.

    One secret that signed it is enough, for receivers of several subscriptions, and while one rotates.
    """
    message_id, timestamp_text, given = (
        headers.get(f"webhook-{name}", "") for name in ("id", "timestamp", "signature")
    )
    if not (message_id and timestamp_text and given):
        return SignatureProblem.NOT_SIGNED
    # isdigit alone would take other scripts' digits.
    if not (timestamp_text.isascii() and timestamp_text.isdigit()) or (
        len(timestamp_text) > _MAX_TIMESTAMP_DIGITS
    ):
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
    # Every pair, in constant time: neither how long nor how many tells how near a guess was.
    matches = [hmac.compare_digest(ours, theirs) for ours in expected for theirs in signatures]
    return None if any(matches) else SignatureProblem.NO_MATCH


def _key(secret: str) -> bytes:
    if not secret.startswith(SECRET_PREFIX):
        raise ValueError(f"a signing secret must begin with {SECRET_PREFIX}")
    return binascii.a2b_base64(secret[len(SECRET_PREFIX) :], strict_mode=True)


def _base64(digest: bytes) -> str:
    return binascii.b2a_base64(digest, newline=False).decode("ascii")
