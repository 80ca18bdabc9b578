"""The table of a run, for a terminal and for the README. Pure: lines in, text out."""

from collections.abc import Sequence

from tests.bench.rows import Line, Unit

HEADINGS = ("measure", "median", "spread", "goal", "")
LEFT = (True, False, False, False, True)


def plain_table(lines: Sequence[Line]) -> str:
    """Columns as wide as they need be."""
    cells = [HEADINGS, *map(cells_of, lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(row, widths, LEFT, strict=True)
        ).rstrip()
        for row in cells
    )


def markdown_table(lines: Sequence[Line]) -> str:
    """The same, as Markdown."""
    marks = ["---" if left else "--:" for left in LEFT]
    rows = [HEADINGS, marks, *map(cells_of, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells_of(line: Line) -> tuple[str, str, str, str, str]:
    """The texts of one line."""
    goal = "" if line.goal is None else str(line.goal)
    if line.summary is None:
        return line.label, "—", "", goal, line.verdict
    median, least, most = (shown(value, line.unit) for value in line.summary)
    unit = f" {line.unit.name}" if line.unit.name else ""
    return line.label, f"{median}{unit}", f"{least} to {most}", goal, line.verdict


def shown(value: float, unit: Unit) -> str:
    """With as many digits as the unit has."""
    return f"{value:,.{unit.digits}f}"
