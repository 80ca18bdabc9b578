"""Charts: every attempt is drawn once, numbers are readable, and text from outside cannot become markup."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from webhookd.console import charts

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def point(place: int, delivered: int = 0, failed: int = 0, dead_lettered: int = 0) -> dict[str, Any]:
    """Return a point of the API."""
    at = START + timedelta(minutes=place)
    return {
        "at": at.isoformat(),
        "delivered": delivered,
        "failed": failed,
        "dead_lettered": dead_lettered,
    }


def heights(drawing: str, kind: str) -> list[float]:
    """Return the heights of the bars of a class."""
    return [float(found) for found in re.findall(rf'class="{kind}"[^>]* height="([\d.]+)"', drawing)]


def test_bar_chart_draws_each_attempt_once() -> None:
    """The failure that made a dead letter is not drawn as another failed attempt."""
    drawing = charts.bar_chart([point(0, 10, 8, 2), point(1)], 60, "Attempts")
    scale = charts.HEIGHT / 20
    assert heights(drawing, "delivered") == [10 * scale]
    assert heights(drawing, "failed") == [6 * scale]
    assert heights(drawing, "dead") == [2 * scale]
    assert "10 delivered, 6 failed, 2 became a dead letter" in drawing


def test_a_dead_letter_without_an_attempt_is_drawn() -> None:
    """After a lowered limit, deliveries become dead letters without a new attempt."""
    assert heights(charts.bar_chart([point(0, dead_lettered=4)], 60, "Attempts"), "dead") == [charts.HEIGHT]


def test_empty_chart_has_an_axis_and_says_so() -> None:
    """No points, and points without activity."""
    for points in ([], [point(0), point(1)]):
        drawing = charts.bar_chart(points, 60, "Attempts")
        assert "no attempts" in drawing
        assert "<rect" not in drawing


def test_axis_numbers_are_readable() -> None:
    """The axis ends at a round number that is not below the highest bar."""
    for number, expected in ((0, 4), (5, 8), (9, 20), (401, 800), (12_345, 20_000)):
        assert charts._round_up(number) == expected
    assert charts._compact(1500) == "1.5 k"


def test_small_parts_stay_visible_in_a_sparkline() -> None:
    """One failure among a million attempts has at least one pixel."""
    drawing = charts.sparkline([point(0, 1_000_000, 1)], "Last 24 hours")
    assert heights(drawing, "failed") == [1.0]


def test_title_is_escaped() -> None:
    """A title may contain the description of an endpoint."""
    assert "<script>" not in charts.bar_chart([point(0, 1)], 60, "<script>")
    assert "<script>" not in charts.sparkline([point(0, 1)], '"><script>')
