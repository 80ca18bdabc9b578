"""The picture of a run: throughput as bars with the spread of the rounds, and latency beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.rows import ROWS, Line

OURS, OTHERS, LIMIT = "#1f6f8b", "#b8b8b8", "#e0a030"


def draw(lines: Sequence[Line], caption: str, path: Path) -> bool:
    """Write a PNG; False where there is nothing to draw, or nothing to draw with."""
    try:
        # Imported here: a run without it has its table all the same.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return False
    by_label = {line.label: line for line in lines if line.summary is not None}
    throughput = [by_label[row.label] for row in ROWS["throughput"][:6] if row.label in by_label]
    latency = [by_label[row.label] for row in (*ROWS["idle"], *ROWS["latency"]) if row.label in by_label]
    if not throughput and not latency:
        return False
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 1)
    _bars(axes[0], throughput, "deliveries a second, HTTPS, 400-byte payloads")
    _bars(axes[1], latency, "milliseconds from publish to arrival", log=True)
    figure.supxlabel(caption, fontsize=7, wrap=True)
    figure.savefig(path, dpi=150)
    return True


def _bars(axes: Any, lines: Sequence[Line], title: str, *, log: bool = False) -> None:
    """A bar for each median, and a whisker from the least to the most."""
    summaries = [line.summary for line in lines if line.summary is not None]
    medians = [summary.median for summary in summaries]
    axes.barh(
        [line.label for line in lines],
        medians,
        xerr=[
            [summary.median - summary.least for summary in summaries],
            [summary.most - summary.median for summary in summaries],
        ],
        color=[_color(line.label) for line in lines],
        capsize=4,
    )
    for place, median in enumerate(medians):
        axes.annotate(f" {median:,.0f}" if median >= 100 else f" {median:.1f}", (median, place), va="bottom")
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    if log and medians:
        axes.set_xscale("log")
    axes.grid(axis="x", alpha=0.3)


def _color(label: str) -> str:
    if label.startswith("bare"):
        return LIMIT
    return OURS if label.startswith(("webhookd", "publish")) else OTHERS
