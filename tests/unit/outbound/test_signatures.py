"""Signatures, compared with the reference library."""

import base64
import os
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from webhookd.outbound import signatures
from webhookd.outbound.signatures import SignatureProblem, sign


def make_secret(length: int = 32) -> str:
    """Make a new secret, as the database does."""
    return f"whsec_{base64.b64encode(os.urandom(length)).decode()}"


def verify(secret: str, message_id: str, timestamp: int, signature: str, body: bytes) -> None:
    """Verify with the reference library, which raises on failure."""
    headers = {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature,
    }
    Webhook(secret).verify(body, headers, json_parse=False)


@given(st.integers(24, 64), st.text(st.characters(codec="utf-8")).map(str.encode))
def test_reference_library_verifies_our_signatures(length: int, body: bytes) -> None:
    """Secrets of every allowed length, and any body."""
    secret, now = make_secret(length), int(time.time())
    verify(secret, "evt_1", now, sign([secret], "evt_1", now, body), body)


def test_example_of_the_specification() -> None:
    """The expected signature comes from the specification."""
    signature = sign(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_every_live_secret_signs_newest_first() -> None:
    """While rotating, a receiver with either secret can verify; with a third secret it cannot."""
    new, old, other = make_secret(), make_secret(), make_secret()
    now = int(time.time())
    signature = sign([new, old], "evt_1", now, b"{}")
    verify(new, "evt_1", now, signature, b"{}")
    verify(old, "evt_1", now, signature, b"{}")
    with pytest.raises(WebhookVerificationError):
        verify(other, "evt_1", now, signature, b"{}")
    assert signature.split(" ") == [sign([new], "evt_1", now, b"{}"), sign([old], "evt_1", now, b"{}")]


@pytest.mark.parametrize(
    ("message_id", "delay", "body"),
    [("evt_2", 0, b"{}"), ("evt_1", 1, b"{}"), ("evt_1", 0, b"{ }")],
    ids=["id", "timestamp", "body"],
)
def test_changed_message_is_rejected(message_id: str, delay: int, body: bytes) -> None:
    """A change of the id, the timestamp or the body is detected."""
    secret, now = make_secret(), int(time.time())
    signature = sign([secret], "evt_1", now, b"{}")
    with pytest.raises(WebhookVerificationError):
        verify(secret, message_id, now + delay, signature, body)


@pytest.mark.parametrize("secret", ["", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_!", "whsec_abc"])
def test_invalid_secret_is_an_error(secret: str) -> None:
    """A damaged secret is an error, and not a different key."""
    with pytest.raises(ValueError, match=r"."):
        sign([secret], "evt_1", 1, b"{}")


# Verification. The reference library signs the messages.


def signed(secret: str, body: bytes, *, at: int, message_id: str = "evt_1") -> dict[str, str]:
    """Make the headers of a message, signed by the reference library."""
    text = body.decode("utf-8")
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": Webhook(secret).sign(message_id, datetime.fromtimestamp(at, UTC), text),
    }


@given(st.integers(24, 64), st.text(st.characters(codec="utf-8")).map(str.encode))
def test_signatures_of_the_reference_library_are_verified(length: int, body: bytes) -> None:
    """Secrets of every length and any body; another secret does not verify."""
    secret, now = make_secret(length), int(time.time())
    headers = signed(secret, body, at=now)
    assert signatures.verify([secret], headers, body, now) is None
    assert signatures.verify([make_secret(), secret], headers, body, now) is None
    assert signatures.verify([make_secret()], headers, body, now) is SignatureProblem.NO_MATCH
    assert signatures.verify([], headers, body, now) is SignatureProblem.NO_MATCH


@given(
    st.sampled_from(["webhook-id", "webhook-timestamp", "webhook-signature"]),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF)),
)
def test_forged_header_is_rejected(name: str, value: str) -> None:
    """Nothing raises, and everything we accept the reference library accepts too (but not vice versa)."""
    secret, now = make_secret(), int(time.time())
    headers = signed(secret, b"{}", at=now) | {name: value}
    if signatures.verify([secret], headers, b"{}", now) is None:
        Webhook(secret).verify(b"{}", headers, json_parse=False)


@pytest.mark.parametrize(
    ("age", "problem"),
    [
        (0, None),
        (300, None),
        (-300, None),
        (301, SignatureProblem.TOO_OLD),
        (-301, SignatureProblem.TOO_NEW),
    ],
)
def test_timestamps_are_tolerated_for_five_minutes(age: int, problem: SignatureProblem | None) -> None:
    """An older message may be a replay; a newer one comes from a wrong clock."""
    secret, now = make_secret(), 1_700_000_000
    assert signatures.verify([secret], signed(secret, b"{}", at=now - age), b"{}", now) is problem


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_missing_or_empty_header_is_not_signed(name: str) -> None:
    """A missing header and an empty header are the same."""
    secret, now = make_secret(), int(time.time())
    headers = signed(secret, b"{}", at=now)
    assert signatures.verify([secret], headers | {name: ""}, b"{}", now) is SignatureProblem.NOT_SIGNED
    del headers[name]
    assert signatures.verify([secret], headers, b"{}", now) is SignatureProblem.NOT_SIGNED


@pytest.mark.parametrize("text", ["soon", "-1", "1e9", "1.5", "١٢", "9" * 13, "0x10"])
def test_invalid_timestamp_is_rejected(text: str) -> None:
    """Only ASCII digits are valid, and at most 12 of them."""
    secret = make_secret()
    headers = signed(secret, b"{}", at=1_700_000_000) | {"webhook-timestamp": text}
    assert signatures.verify([secret], headers, b"{}", 1_700_000_000) is SignatureProblem.NO_TIMESTAMP


def test_non_utf8_headers_are_rejected() -> None:
    """A server passes such bytes on as lone surrogates."""
    secret, now = make_secret(), int(time.time())
    headers = signed(secret, b"{}", at=now)
    for name in ("webhook-id", "webhook-signature"):
        assert (
            signatures.verify([secret], headers | {name: "\udcff"}, b"{}", now) is SignatureProblem.NO_MATCH
        )
