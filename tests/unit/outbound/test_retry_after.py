"""Parsing of the Retry-After header."""

from datetime import UTC, datetime

import pytest

from webhookd.outbound.outcome import retry_after_seconds

NOW = datetime(2026, 11, 16, 12, 0, 0, tzinfo=UTC)
IN_A_MINUTE = "Mon, 16 Nov 2026 12:01:00 GMT"


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        ("0", None, 0),
        ("120", None, 120),
        (" 7 ", None, 7),
        ("99999999999", None, 31_536_000),
        (IN_A_MINUTE, None, 60),
        ("Monday, 16-Nov-26 12:01:00 GMT", None, 60),
        ("Mon Nov 16 12:01:00 2026", None, 60),
        ("Mon, 16 Nov 2026 11:00:00 GMT", None, 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", None, 31_536_000),
        # An endpoint whose clock is ten minutes behind ours.
        (IN_A_MINUTE, "Mon, 16 Nov 2026 11:50:00 GMT", 660),
        (IN_A_MINUTE, "garbage", 60),
    ],
)
def test_seconds_and_dates_are_parsed_and_bounded(value: str, date: str | None, seconds: float) -> None:
    """Accepts seconds and the three date forms, relative to the endpoint's own clock if it sends one."""
    assert retry_after_seconds(value, date, NOW) == seconds


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "soon",
        "-1",
        "1.5",
        "1e3",
        "inf",
        "nan",
        "٣",
        "9" * 400,
        "0x10",
        "Mon, 99 Nov 2026 12:01:00 GMT",
    ],
)
def test_invalid_value_is_ignored(value: str | None) -> None:
    """A value in neither form counts as missing."""
    assert retry_after_seconds(value, None, NOW) is None
