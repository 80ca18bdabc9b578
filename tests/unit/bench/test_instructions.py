"""Tests of what `make instructions` makes of callgrind's dumps."""

import pytest

from tests.bench.instructions import PUBLISHING, STEPS, Costs, added, parse_totals, per_delivery, table


def test_totals_of_a_dump() -> None:
    """The header has other lines with numbers; a dump without totals is an error, not zero."""
    dump = "# callgrind format\npid: 7\npart: 2\nevents: Ir\n\nfn=(1) totals\n16 5\n\ntotals: 1234\n"
    assert parse_totals(dump) == 1234
    with pytest.raises(ValueError, match="no totals"):
        parse_totals("pid: 7\nevents: Ir\n")


def test_costs_are_means_per_delivery() -> None:
    """One expensive cycle of several counts."""
    assert per_delivery([Costs(100, 10, 2), Costs(300, 30, 4)], batch=2) == Costs(100, 10, 1.5)
    assert added([Costs(1, 2, 3), Costs(10, 20, 30)]) == Costs(11, 22, 33)


def test_table_adds_the_steps_after_publishing() -> None:
    """Publishing has its own line and is part of the last sum only."""
    lines = table(100, [Costs(1000, 10, 1)] * len(STEPS)).splitlines()
    sizes = [len([name for name in STEPS if name != PUBLISHING]), len(STEPS)]
    assert len(lines) == len(STEPS) + 3
    assert [line.split()[-3:] for line in lines[-2:]] == [
        [f"{size},000", f"{size}0", f"{size}.0"] for size in sizes
    ]
