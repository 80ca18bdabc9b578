"""The chart of a run: bars of throughput and latency, with the spread of the rounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.rows import RATE, ROWS, Line

OURS, PEERS, LIMIT = "#1f6f8b", "#b8b8b8", "#e0a030"


def draw(lines: Sequence[Line], caption: str, path: Path) -> bool:
    """Write a PNG. Returns False if there is nothing to draw, or matplotlib is missing."""
    try:
        # Imported here, so that a run without matplotlib still writes its table.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return False
    by_label = {line.label: line for line in lines if line.summary is not None}
    throughput = [
        by_label[row.label] for row in ROWS["throughput"] if row.unit == RATE and row.label in by_label
    ]
    latency = [by_label[row.label] for row in (*ROWS["idle"], *ROWS["latency"]) if row.label in by_label]
    if not throughput and not latency:
        return False
    parts = [
        (throughput, "deliveries per second, HTTPS, 400-byte payloads", False),
        (latency, "milliseconds from publish to arrival", True),
    ]
    drawn = [part for part in parts if part[0]]
    figure = Figure(figsize=(11, 0.9 + 0.35 * (len(throughput) + len(latency) + 3)), layout="constrained")
    heights = [len(part[0]) + 1 for part in drawn]
    columns = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)
    for [axes], (shown, title, log) in zip(columns, drawn, strict=True):
        _bars(axes, shown, title, log=log)
    figure.supxlabel(caption, fontsize=7, wrap=True)
    figure.savefig(path, dpi=150)
    return True


def _bars(axes: Any, lines: Sequence[Line], title: str, *, log: bool) -> None:
    """A bar for each median, with a whisker from the minimum to the maximum."""
    summaries = [line.summary for line in lines if line.summary is not None]
    medians = [summary.median for summary in summaries]
    below = [summary.median - summary.minimum for summary in summaries]
    above = [summary.maximum - summary.median for summary in summaries]
    labels = [line.label.removeprefix("publish to arrival, ") for line in lines]
    colors = [_color(line.label) for line in lines]
    axes.barh(labels, medians, xerr=[below, above], color=colors, capsize=4)
    for place, summary in enumerate(summaries):
        text = f"{summary.median:,.0f}" if summary.median >= 100 else f"{summary.median:.1f}"
        axes.annotate(
            text, (summary.maximum, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    if log:
        axes.set_xscale("log")
        # The lengths of bars are comparable only if all start at the same number.
        axes.set_xlim(1, 2 * max(summary.maximum for summary in summaries))
    else:
        axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)


def _color(label: str) -> str:
    if label.startswith("bare"):
        return LIMIT
    return OURS if label.startswith(("webhookd", "publish")) else PEERS
