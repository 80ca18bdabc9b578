"""The period of a chart, and the estimate of a percentile."""

from datetime import UTC, datetime, timedelta

import pytest

from webhookd.core.errors import Refusal, Refused
from webhookd.deliveries.stats import (
    LONGEST_PERIOD,
    MAX_CHOSEN_POINTS,
    PLACES,
    SPARKLINE_POINTS,
    percentile,
    period,
    sparkline_period,
)

NOW = datetime(2026, 3, 1, 12, 34, 56, 789, UTC)
HOUR = timedelta(hours=1)


def histogram(**counts: int) -> list[int]:
    """Return attempts by place, such as `p0=3`."""
    return [counts.get(f"p{place}", 0) for place in range(PLACES)]


@pytest.mark.parametrize(
    ("durations", "share", "expected"),
    [
        (histogram(), 0.5, None),
        (histogram(p0=10), 0.5, 5.0),
        (histogram(p0=1, p1=1), 0.5, 10.0),
        (histogram(p0=50, p3=50), 0.95, 95.0),  # from 50 to 100 ms
        (histogram(p11=1), 0.5, 30_000),
        (histogram(p0=99, p11=1), 0.95, 9.6),
    ],
)
def test_percentile(durations: list[int], share: float, expected: float | None) -> None:
    """Linear inside of a place; the last place has no end, and counts as its beginning."""
    assert percentile(durations, share) == expected


@pytest.mark.parametrize("hours", [0.01, 1, 2, 3, 11.9, 12.1, 24, 168, 743.9])
def test_range_is_in_whole_steps_and_bounded(hours: float) -> None:
    """It contains the range that was asked for, and little more; the points are few."""
    since = NOW - timedelta(hours=hours)
    chosen = period(NOW, since, None, None)
    assert chosen.since <= since < chosen.since + chosen.step
    assert chosen.until - chosen.step < NOW <= chosen.until
    assert chosen.points * chosen.step == chosen.until - chosen.since
    assert chosen.points <= MAX_CHOSEN_POINTS + 1
    assert chosen.at(chosen.points) == chosen.until


def test_whole_hours_where_minutes_are_gone() -> None:
    """A step of hours begins with an hour, as the rows do."""
    for chosen in (
        period(NOW, NOW - 13 * HOUR, None, None),
        *(sparkline_period(NOW, it) for it in (24, 720)),
    ):
        assert chosen.step % HOUR == timedelta(0)
        assert (chosen.since.minute, chosen.since.second, chosen.since.microsecond) == (0, 0, 0)


@pytest.mark.parametrize("hours", [2, 24, 168, 720])
def test_sparkline_ends_now(hours: int) -> None:
    """It has as many points for each length, and the last one contains the present."""
    chosen = sparkline_period(NOW, hours)
    assert chosen.points == SPARKLINE_POINTS
    assert chosen.until - HOUR < NOW <= chosen.until


@pytest.mark.parametrize(
    ("since", "until", "step_seconds"),
    [
        (NOW, NOW, None),
        (NOW, NOW - HOUR, None),
        (NOW + HOUR, None, None),
        (NOW - LONGEST_PERIOD - HOUR, None, None),
        (NOW - 13 * HOUR, None, 60),
        (NOW - 13 * HOUR, None, 300),
        (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), None),
        (None, datetime.min.replace(tzinfo=UTC), None),
    ],
)
def test_refused_periods(since: datetime | None, until: datetime | None, step_seconds: int | None) -> None:
    """Empty, in the future, too long, or finer than what is kept."""
    with pytest.raises(Refused) as raised:
        period(NOW, since, until, step_seconds)
    assert raised.value.refusal is Refusal.INVALID_ARGUMENT
