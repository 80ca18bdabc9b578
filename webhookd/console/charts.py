"""Charts, drawn on the server: bars as SVG, labels as text around it. Pure: points in, markup out.

Colours are classes of the style sheet. The SVG is stretched to the width of the page, so it has no text.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from markupsafe import Markup

HEIGHT = 160
SLOT = 10  # the width of a bar with the space beside it
GRID_LINES = 4
TIME_LABELS = 6
SPARK_WIDTH, SPARK_HEIGHT = 120, 26
_DAY_SECONDS = 86_400
_THOUSAND, _MILLION = 1_000, 1_000_000


class Part(NamedTuple):
    """One part of a bar: its class, and its name for people."""

    kind: str
    label: str


PARTS = (Part("delivered", "delivered"), Part("failed", "failed"), Part("dead", "became a dead letter"))


def bar_chart(points: Sequence[dict[str, Any]], step_seconds: int, title: str) -> Markup:
    """Draw attempts over time: delivered, failed, and those that used up the last attempt."""
    heights = [_parts_of(point) for point in points]
    top = _round_up(max(map(sum, heights), default=0))
    lines = [
        Markup('<line class="grid" x1="0" x2="{}" y1="{y}" y2="{y}"/>').format(
            len(points) * SLOT, y=HEIGHT * line / GRID_LINES
        )
        for line in range(GRID_LINES + 1)
    ]
    bars = []
    for place, (point, counts) in enumerate(zip(points, heights, strict=True)):
        if not sum(counts):
            continue
        named = ", ".join(f"{count:,} {part.label}" for part, count in zip(PARTS, counts, strict=True))
        stack = _stack(counts, place * SLOT + 1, SLOT - 2, HEIGHT, HEIGHT / top)
        bars.append(
            Markup("<g><title>{}: {}</title>{}</g>").format(_label(point["at"], step_seconds), named, stack)
        )
    svg = Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>').format(
        max(1, len(points)) * SLOT, HEIGHT, Markup("").join([*lines, *bars])
    )
    numbers = [_compact(top * line / GRID_LINES) for line in range(GRID_LINES, -1, -1)]
    every = max(1, -(-len(points) // TIME_LABELS))
    times = [_label(point["at"], step_seconds) for point in points[::every]]
    return Markup(
        '<div class="chart" role="img" aria-label="{}">'
        '<div class="numbers">{}</div>{}<div class="times">{}</div></div>'
    ).format(f"{title}: {_summary(heights)}", _spans(numbers), svg, _spans(times))


def sparkline(points: Sequence[dict[str, Any]], title: str) -> Markup:
    """Draw small bars without axes: delivered, and failed on top."""
    heights = [(point["delivered"], point["failed"], 0) for point in points]
    top = max(map(sum, heights), default=0) or 1
    slot = SPARK_WIDTH / max(1, len(points))
    bars = Markup("").join(
        _stack(counts, place * slot, slot - 1, SPARK_HEIGHT, SPARK_HEIGHT / top)
        for place, counts in enumerate(heights)
    )
    return Markup('<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        SPARK_WIDTH, SPARK_HEIGHT, f"{title}: {_summary(heights)}", bars
    )


def _parts_of(point: dict[str, Any]) -> tuple[int, int, int]:
    """Return the heights of PARTS. The last failure of a dead letter is one of the failed attempts."""
    dead = point["dead_lettered"]
    return point["delivered"], max(0, point["failed"] - dead), dead


def _stack(counts: Sequence[int], x: float, width: float, bottom: float, scale: float) -> Markup:
    """Draw one bar. A part that is not zero can be seen."""
    y = bottom
    drawn = []
    for part, count in zip(PARTS, counts, strict=True):
        if count:
            height = max(1.0, count * scale)
            y -= height
            drawn.append(
                Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
                    part.kind, x, max(0.0, y), max(0.8, width), height
                )
            )
    return Markup("").join(drawn)


def _spans(texts: Sequence[str]) -> Markup:
    return Markup("").join(Markup("<span>{}</span>").format(text) for text in texts)


def _summary(heights: Sequence[Sequence[int]]) -> str:
    sums = [sum(counts) for counts in zip(*heights, strict=True)]
    named = [f"{total:,} {part.label}" for part, total in zip(PARTS, sums, strict=False) if total]
    return ", ".join(named) or "no attempts"


def _label(at: str | datetime, step_seconds: int) -> str:
    moment = (at if isinstance(at, datetime) else datetime.fromisoformat(at)).astimezone(UTC)
    if step_seconds >= _DAY_SECONDS:
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M}" if step_seconds < 3600 else f"{moment:%b} {moment.day}, {moment:%H:%M}"  # noqa: PLR2004


def _round_up(number: int) -> int:
    """Return a number of the form 4, 8, 20, 40, 80, 200 …, which makes a readable axis."""
    size = 1
    while True:
        for factor in (GRID_LINES, 2 * GRID_LINES):
            if size * factor >= number:
                return size * factor
        size *= 5 if str(size).startswith("1") else 2


def _compact(number: float) -> str:
    if number >= _MILLION:
        return f"{number / _MILLION:g} M"
    return f"{number / _THOUSAND:g} k" if number >= _THOUSAND else f"{number:g}"
