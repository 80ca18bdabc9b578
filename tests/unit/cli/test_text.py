"""Text for people: escapes, ages and times."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webhookd.cli.options import escaped, parsed_time
from webhookd.cli.output import absolute, duration, excerpt, relative

NOW = datetime(2026, 1, 31, 8, 0, 0, tzinfo=UTC)


@given(st.text())
def test_escaped_text_cannot_control_a_terminal(text: str) -> None:
    """For any text, every remaining character is printable and can be encoded."""
    shown = escaped(text)
    assert all(character.isprintable() or character.isspace() for character in shown)
    assert not any(character in shown for character in "\n\r\t\x0b\x0c\x85\u2028\u2029")
    shown.encode()


def test_escapes_are_those_of_python() -> None:
    """Harmless characters are unchanged; the others stay readable."""
    assert escaped("é 漢 ok") == "é 漢 ok"
    assert escaped("a\n\x1b[31m\x9b\u202e\ud800\U000e0001") == r"a\n\x1b[31m\x9b\u202e\ud800\U000e0001"
    assert escaped(7) == "7"
    assert (excerpt("a\nb", 2), excerpt("ab", 2)) == (r"a\n…", "ab")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0s"),
        (0.44, "0.4s"),
        (9.96, "10s"),
        (59, "59s"),
        (61, "1m 1s"),
        (3600, "1h"),
        (86_400 + 300, "1d"),
        (90_000, "1d 1h"),
    ],
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    """The largest unit, and the next one unless it is zero."""
    assert duration(seconds) == shown


def test_times_are_relative_and_absolute() -> None:
    """Relative: past, future and now. Absolute: UTC, to the second."""
    assert relative(NOW - timedelta(minutes=3), NOW) == "3m ago"
    assert relative(NOW + timedelta(seconds=40), NOW) == "in 40s"
    assert relative(NOW + timedelta(seconds=0.3), NOW) == "now"
    assert absolute(NOW.astimezone()) == "2026-01-31T08:00:00Z"


def test_time_or_age_is_parsed() -> None:
    """Both give the same result; a time without a zone and other texts are rejected."""
    assert parsed_time("2h", NOW) == parsed_time("2026-01-31T08:00:00+02:00", NOW)
    assert parsed_time("7d", NOW) == NOW - timedelta(days=7)
    for text in ("", "2", "h", "2w", "-2h", "2026-01-31T08:00:00", "2h\n", "\u0662h"):
        with pytest.raises(ValueError, match=r"."):
            parsed_time(text, NOW)
