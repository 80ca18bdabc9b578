"""Tests of the signatures, with the reference library as the judge."""

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


# The other way: what a receiver asks. The reference library signs, and says whether it agrees.


def signed(secret: str, body: bytes, *, at: int, message_id: str = "evt_1") -> dict[str, str]:
    """A message's headers, signed by the reference library."""
    text = body.decode("utf-8")
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": Webhook(secret).sign(message_id, datetime.fromtimestamp(at, UTC), text),
    }


@given(st.integers(24, 64), st.text(st.characters(codec="utf-8")).map(str.encode))
def test_what_the_reference_library_signs_is_verified(length: int, body: bytes) -> None:
    """Secrets of every length, and any body; by another secret it is not."""
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
def test_a_forged_header_is_refused_as_the_reference_library_refuses_it(name: str, value: str) -> None:
    """Whatever stands in it; nothing raises. What it lets pass, such as 1e9 for a time, we need not."""
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
def test_five_minutes_either_way_are_tolerated(age: int, problem: SignatureProblem | None) -> None:
    """Longer ago, it may be a replay; later, somebody's clock is wrong."""
    secret, now = make_secret(), 1_700_000_000
    assert signatures.verify([secret], signed(secret, b"{}", at=now - age), b"{}", now) is problem


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_message_without_one_of_the_headers_is_not_signed(name: str) -> None:
    """Missing and empty are the same."""
    secret, now = make_secret(), int(time.time())
    headers = signed(secret, b"{}", at=now)
    assert signatures.verify([secret], headers | {name: ""}, b"{}", now) is SignatureProblem.NOT_SIGNED
    del headers[name]
    assert signatures.verify([secret], headers, b"{}", now) is SignatureProblem.NOT_SIGNED


@pytest.mark.parametrize("text", ["soon", "-1", "1e9", "1.5", "١٢", "9" * 13, "0x10"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """Digits, and not more than a time has."""
    secret = make_secret()
    headers = signed(secret, b"{}", at=1_700_000_000) | {"webhook-timestamp": text}
    assert signatures.verify([secret], headers, b"{}", 1_700_000_000) is SignatureProblem.NO_TIMESTAMP


def test_bytes_that_are_no_text_are_refused() -> None:
    """A server hands them on as lone surrogates."""
    secret, now = make_secret(), int(time.time())
    headers = signed(secret, b"{}", at=now)
    for name in ("webhook-id", "webhook-signature"):
        assert (
            signatures.verify([secret], headers | {name: "\udcff"}, b"{}", now) is SignatureProblem.NO_MATCH
        )
