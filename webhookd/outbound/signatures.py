"""Standard Webhooks 1.0. Pure: secrets and a message in, the value of `webhook-signature` out."""

import binascii
import hmac
from collections.abc import Sequence

SECRET_PREFIX = "whsec_"  # noqa: S105 - what a secret begins with is none


def sign(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """One `v1,…` for each secret, in their order: newest first."""
    # One-shot, from the text each time: 2.9 µs for 400 bytes and 0.4 µs for the secret, where a copied,
    # precomputed HMAC takes 2.3 µs. Less than a hundredth of a POST, so no cache of keys to keep.
    signed = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
    return " ".join(f"v1,{_base64(hmac.digest(_key(secret), signed, 'sha256'))}" for secret in secrets)


def _key(secret: str) -> bytes:
    if not secret.startswith(SECRET_PREFIX):
        raise ValueError(f"a signing secret must begin with {SECRET_PREFIX}")
    return binascii.a2b_base64(secret[len(SECRET_PREFIX) :], strict_mode=True)


def _base64(digest: bytes) -> str:
    return binascii.b2a_base64(digest, newline=False).decode("ascii")
