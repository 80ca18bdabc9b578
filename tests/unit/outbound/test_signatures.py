"""Tests of the signatures, with the reference library as the judge."""

import base64
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from webhookd.outbound.signatures import sign


def make_secret(length: int = 32) -> str:
    """A new secret, as the database makes them."""
    return f"whsec_{base64.b64encode(os.urandom(length)).decode()}"


def verify(secret: str, message_id: str, timestamp: int, signature: str, body: bytes) -> None:
    """Let the reference library verify; it raises if it does not."""
    headers = {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature,
    }
    Webhook(secret).verify(body, headers, json_parse=False)


@given(st.integers(24, 64), st.text(st.characters(codec="utf-8")).map(str.encode))
def test_the_reference_library_verifies(length: int, body: bytes) -> None:
    """Secrets of every length that the database keeps, and any body."""
    secret, now = make_secret(length), int(time.time())
    verify(secret, "evt_1", now, sign([secret], "evt_1", now, body), body)


def test_the_specifications_own_example() -> None:
    """A signature that did not come from our code."""
    signature = sign(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_every_live_secret_signs_newest_first() -> None:
    """While rotating, a receiver that has either secret verifies; a third secret does not."""
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
def test_everything_that_is_signed_matters(message_id: str, delay: int, body: bytes) -> None:
    """A change of the id, the time or the body is found out."""
    secret, now = make_secret(), int(time.time())
    signature = sign([secret], "evt_1", now, b"{}")
    with pytest.raises(WebhookVerificationError):
        verify(secret, message_id, now + delay, signature, body)


@pytest.mark.parametrize("secret", ["", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_!", "whsec_abc"])
def test_what_is_no_secret_signs_nothing(secret: str) -> None:
    """A damaged secret is an error, and not another key."""
    with pytest.raises(ValueError, match=r"."):
        sign([secret], "evt_1", 1, b"{}")
