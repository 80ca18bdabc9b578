"""Forms that are damaged or of another type: each gets a page with the reason, and no error is logged."""

import pytest

from tests.flow.conftest import MakeApi

FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        (FORM, b"token=\xff", 400),
        (FORM, b"token=%ff", 400),
        (FORM, b"&".join([b"a=b"] * 2000), 400),
        (FORM, b"token=" + b"x" * 20_000, 413),
        (f"{FORM}; charset=nope", b"token=x", 415),
        (f"{FORM}; charset=raw_unicode_escape", b"token=\\ud800", 415),
        # Decoding a megabyte of it would take ten seconds.
        (f"{FORM}; charset=punycode", b"token=x", 415),
        ("multipart/form-data", b"token=x", 415),
        ("application/json", b'{"token": "x"}', 415),
    ],
)
async def test_damaged_forms_are_refused(
    make_api: MakeApi, content_type: str, body: bytes, status: int
) -> None:
    """They need no session, so any client can send them."""
    api = await make_api()
    for path in ("/login", "/portal/enter"):
        answer = await api.request("POST", path, data=body, headers={"Content-Type": content_type})
        assert answer.status == status, path
        assert answer.headers["Content-Type"].startswith("text/html")
    assert not api.daemon.logged("request failed")


async def test_stream_needs_the_number_of_an_endpoint(make_api: MakeApi) -> None:
    """A number in another notation is refused, as a text is."""
    api = await make_api()
    for wrong in ("1.0", "5e0", "x"):
        answer = await api.get(f"/live/stream?subscription_id={wrong}")
        assert answer.status == 422, wrong
    assert not api.daemon.logged("request failed")
